"""Which folder a run may have, and what one that is there already holds."""

import shutil
import time
from pathlib import Path

from store.errors import RunError
from store.lock import LOCK, OWNER, RunLock
from store.manifest import MANIFEST, read_manifest
from store.object_store_mirror import Mirror, place_of
from store.object_store_uri import uri_of
from store.partitions import PARTITIONS
from store.registry import default_uri

RUNS = Path("runs")  # where runs go that are given no folder
CONFIG = "config.json"
SPOOL = "registry-queue.jsonl"


def new_run_folder(runs: Path, now: time.struct_time) -> Path:
    """A name for a run that starts now; counted up if it is taken."""
    name = time.strftime("%Y%m%d-%H%M%S", now)
    folder, number = runs / name, 1
    while folder.exists():
        number += 1
        folder = runs / f"{name}-{number}"
    return folder


def opened(run: Path, *, new: bool = False) -> tuple[Path, Mirror]:
    """Where to work on a run that is named by its folder or by its place on an object store, and what its commits are
    copied to. What it has committed there is fetched.

    Raises:
        RunError: another process of this machine works on it, the place cannot be one of a run, or it holds a finished
            one and `new` asks for another.
        OmnidraftError: the store does not answer, or what is there is damaged (`CorruptError`).
    """
    folder, mirror = place_of(run)
    if uri_of(run):
        there = mirror.manifest() if new else None
        if there and there.finished:
            raise RunError(f"{mirror.name} holds a finished run; name another place with --run")
        with RunLock(folder):
            shutil.rmtree(folder / PARTITIONS, ignore_errors=True)
            mirror.pull()
            for name in mirror.partitions():
                mirror.partition(name).pull()
    return folder, mirror


def mlflow_of(run: str) -> str:
    """The MLflow store that a run sends to unless another is named: beside its folder; below `runs` for a run on an
    object store, which has none."""
    return default_uri(RUNS if uri_of(Path(run)) else Path(run).parent)


def require_new(run_folder: Path, name: str | None = None) -> None:
    """Refuse a folder that already holds something, or cannot be one.

    `name`: of the run for messages, if that is not the folder. Raises `RunError`.
    """
    name = name or str(run_folder)
    taken = [path for path in (run_folder, *run_folder.parents) if path.exists() and not path.is_dir()]
    if taken:
        raise RunError(f"a run needs a folder, but {taken[0]} is a file; name another with --run")
    if is_unfinished(run_folder):
        raise RunError(
            f"{name} holds a run that is not finished; go on with it by `omnidraft replay --resume {name}` (that of a "
            f"server by `omnidraft serve --resume {name}`) or name another folder with --run"
        )
    if run_folder.exists() and any(_is_of_somebody(path.name) for path in run_folder.iterdir()):
        raise RunError(f"a run needs a new or empty folder, but {name} holds files; name another with --run")


def _is_of_somebody(name: str) -> bool:
    """Whether a file is more than what a process that was killed at its very beginning leaves."""
    return name not in (LOCK, OWNER) and not (name.startswith(".") and name.endswith(".tmp"))


def is_unfinished(run_folder: Path) -> bool:
    """Whether the folder holds a run that can be gone on with. Raises as `read_manifest` of one that is there."""
    if not (run_folder / CONFIG).is_file():
        return False
    return not (run_folder / MANIFEST).is_file() or not read_manifest(run_folder).finished
