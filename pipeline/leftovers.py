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
from store.registry import MlflowRegistry

UNSENT_TIMEOUT = 60.0  # seconds that a finished run waits for MLflow


def send_leftovers(config: Config, run_folder: Path, mirror: Mirror) -> str:
    """Send what waits in the queue of a finished run. `mirror`: what its commits were copied to.

    Returns:
        what became of it, in words.

    Raises:
        RunError: nothing waits, or another process is at work there.
    """
    with RunLock(run_folder):
        manifest = read_manifest(run_folder)
        remove_others(run_folder, manifest.checkpoint)
        spool = run_folder / SPOOL
        waiting = sum(1 for _ in undelivered(spool)) if spool.exists() else 0
        if not waiting:
            raise RunError(f"the run in {mirror.name} is finished: there is nothing to go on with; begin another")
        uri = config.publish.mlflow_uri or mlflow_of(mirror.name)
        left = MlflowRegistry(uri, spool, model=config.publish.name, keep=manifest.messages).close(UNSENT_TIMEOUT)
        mirror.claim(manifest)
        mirror.push(manifest)
    if left:
        return f"the run is finished; MLflow at {uri} took {waiting - left} of {waiting} messages, the others wait"
    return f"the run is finished; MLflow at {uri} took the {waiting} messages that waited"
