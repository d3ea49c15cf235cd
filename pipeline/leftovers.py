"""What a finished run could not send to MLflow any more: it was killed, or nobody answered."""

from pathlib import Path

from pipeline.config import Config
from pipeline.run_folder import SPOOL, mlflow_of
from store.checkpoint import remove_others
from store.errors import RunError
from store.lock import RunLock
from store.manifest import read_manifest
from store.object_store_mirror import Mirror
from store.outbox import undelivered
from store.partitions import LEARNER, partition_folder
from store.registry import MlflowRegistry

UNSENT_TIMEOUT = 60.0  # seconds that a finished run waits for MLflow


def send_leftovers(config: Config, run_folder: Path, mirror: Mirror) -> str:
    """Send what waits in the queue of a finished run. `mirror`: what its commits were copied to.

    Returns:
        what became of it, in words.

    Raises:
        RunError: nothing waits, or another process is at work there.
    """
    learner = partition_folder(run_folder, LEARNER)  # whose queue it is in a run of several processes
    uri = config.publish.mlflow_uri or mlflow_of(mirror.name)
    with RunLock(run_folder):
        remove_others(run_folder, read_manifest(run_folder).checkpoint)
        waiting, left = 0, 0
        for folder, place in ((run_folder, mirror), (learner, mirror.partition(LEARNER))):
            found = sum(1 for _ in undelivered(folder / SPOOL)) if (folder / SPOOL).exists() else 0
            if found:
                waiting, left = waiting + found, left + _send(config, folder, place, uri)
    if not waiting:
        raise RunError(f"the run in {mirror.name} is finished: there is nothing to go on with; begin another")
    if left:
        return f"the run is finished; MLflow at {uri} took {waiting - left} of {waiting} messages, the others wait"
    return f"the run is finished; MLflow at {uri} took the {waiting} messages that waited"


def _send(config: Config, folder: Path, mirror: Mirror, uri: str) -> int:
    """What waits in one log's queue. Returns the number of messages that stayed."""
    manifest = read_manifest(folder)
    left = MlflowRegistry(uri, folder / SPOOL, model=config.publish.name, keep=manifest.messages).close(UNSENT_TIMEOUT)
    mirror.claim(manifest)
    mirror.push(manifest)
    return left
