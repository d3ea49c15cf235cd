"""What MLflow costs a plan: the messages of a real run, sent once more into an empty store on this machine."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import process_time

from pipeline.run_folder import SPOOL
from store.errors import RunError
from store.registry import EXPERIMENT, MODEL
from store.spool import message_of, parsed

SENT = ("start", "points", "publish")


def registry_costs(run_folder: Path) -> dict[str, float]:
    """Seconds of processor time per version and per point, and points per prompt.

    One thread sends and MLflow works in it, on SQLite: a server on HTTP takes more, in another process.

    Args:
        run_folder: of a run that published versions, in the place where it was made.

    Raises:
        RunError: it published none.
    """
    from store.mlflow_store import Sender

    spool = run_folder / SPOOL
    lines = [parsed(line) for line in spool.read_bytes().splitlines()] if spool.exists() else []
    messages = [message_of(line) for line in lines if line.get("kind") in SENT]
    if not any(message.kind == "publish" for message in messages):
        raise RunError(f"{run_folder} must hold versions that were sent to MLflow, but has none; see --registry-of")
    seconds: dict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory() as scratch:
        sender = Sender(f"sqlite:///{scratch}/mlflow.db", EXPERIMENT, MODEL, {}, run_folder.resolve())
        for message in messages:
            began = process_time()
            sender.deliver(message.kind, [message.body])
            seconds[message.kind].append(process_time() - began)
    points = [point for message in messages if message.kind == "points" for point in message.body["points"]]
    return {
        "version_seconds": fmean(seconds["publish"]),
        "point_seconds": sum(seconds["points"]) / len(points),
        "points": len(points) / len({step for _, _, step, _ in points}),
    }
