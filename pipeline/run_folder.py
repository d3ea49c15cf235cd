"""Which folder a run may have, and what one that is there already holds."""

import time
from pathlib import Path

from store.errors import RunError
from store.lock import LOCK, OWNER
from store.manifest import MANIFEST, read_manifest

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


def require_new(run_folder: Path) -> None:
    """Refuse a folder that already holds something, or cannot be one.

    Raises:
        RunError: if so.
    """
    taken = [path for path in (run_folder, *run_folder.parents) if path.exists() and not path.is_dir()]
    if taken:
        raise RunError(f"a run needs a folder, but {taken[0]} is a file; name another with --run")
    if is_unfinished(run_folder):
        raise RunError(
            f"{run_folder} holds a run that is not finished; go on with it by `omnidraft replay --resume {run_folder}` "
            "or name another folder with --run"
        )
    if run_folder.exists() and any(_is_of_somebody(path.name) for path in run_folder.iterdir()):
        raise RunError(f"a run needs a new or empty folder, but {run_folder} holds files; name another with --run")


def _is_of_somebody(name: str) -> bool:
    """Whether a file is more than what a process that was killed at its very beginning leaves."""
    return name not in (LOCK, OWNER) and not (name.startswith(".") and name.endswith(".tmp"))


def is_unfinished(run_folder: Path) -> bool:
    """Whether the folder holds a run that can be gone on with. Raises as `read_manifest` of one that is there."""
    if not (run_folder / CONFIG).is_file():
        return False
    return not (run_folder / MANIFEST).is_file() or not read_manifest(run_folder).finished
