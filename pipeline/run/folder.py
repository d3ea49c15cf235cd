"""Folders of runs: names for new ones, and checks of existing ones."""

import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.settings import Config, load
from store.errors import ConfigError, RunError
from store.log.lock import LOCK, OWNER, RunLock
from store.log.manifest import has_manifest, read_manifest
from store.log.partitions import PARTITIONS
from store.log.run_log import Mirror
from store.object_store.mirror import mirror_of
from store.object_store.uri import cache_folder, uri_of
from store.registry.registry import default_uri

RUNS = Path("runs")  # where runs go that are given no folder
CONFIG = "config.json"
VOCABULARY = "vocabulary.json"  # reports on the pairs of vocabularies
MLFLOW = "publish.mlflow_uri"  # the only setting that any run may change when it resumes


def new_run_folder(runs: Path, now: time.struct_time) -> Path:
    """Return a new folder named after the start time, with a number appended if that name is taken."""
    name = time.strftime("%Y%m%d-%H%M%S", now)
    folder, number = runs / name, 1
    while folder.exists():
        number += 1
        folder = runs / f"{name}-{number}"
    return folder


def open_run(run: Path, *, new: bool = False) -> tuple[Path, Mirror]:
    """Return the working folder and the mirror of a run, given its folder or its URI on an object store. The commits on
    the object store are downloaded.
    """
    uri = uri_of(run)
    folder = cache_folder("runs", uri) if uri else run
    mirror = mirror_of(folder, uri)
    if uri:
        there = mirror.manifest() if new else None
        if there and there.finished:
            raise RunError(f"{mirror.name} holds a finished run; name another place with --run")
        with RunLock(folder):
            shutil.rmtree(folder / PARTITIONS, ignore_errors=True)
            mirror.pull()
            for name in mirror.partitions():
                mirror.partition(name).pull()
    return folder, mirror


def open_new_run(run: Path | None, runs: Path = RUNS) -> tuple[Path, Mirror]:
    """Return the working folder and the mirror of a new run, by default of a new folder under `runs`. Raises as
    `open_run`.
    """
    return open_run(run or new_run_folder(runs, time.gmtime()), new=True)


def resumed_config(run_folder: Path, name: str, overrides: Mapping[str, object], section: str = "") -> Config:
    """Return the settings of a resumed run: those that it began with, except for the address of MLflow. The overrides,
    by dotted keys, take the place of the run's own; those of `section` may change as well.
    """
    foreign = [key for key in overrides if key != MLFLOW and not (section and key.startswith(f"{section}."))]
    if foreign:
        also = f" and those of the section '{section}'" if section else ""
        raise ConfigError(
            f"a run resumes with the settings that it began with, so only {MLFLOW}{also} may be given, "
            f"got {', '.join(foreign)}"
        )
    if not (run_folder / CONFIG).is_file():
        raise RunError(f"{name} must hold a run to resume, but has no {CONFIG}; begin one with --run")
    return load(run_folder / CONFIG).with_overrides(overrides)


def mlflow_of(run: str) -> str:
    """Return the default MLflow store of a run: next to its folder, or below `runs` for a run on an object store."""
    return default_uri(RUNS if uri_of(Path(run)) else Path(run).parent)


def require_new(run_folder: Path, name: str | None = None) -> None:
    """Require that a run can be created in a folder: new or empty.

    `name`: of the run for messages, if that is not the folder. Raises `RunError`.
    """
    name = name or str(run_folder)
    taken = [path for path in (run_folder, *run_folder.parents) if path.exists() and not path.is_dir()]
    if taken:
        raise RunError(f"a run needs a folder, but {taken[0]} is a file; name another with --run")
    if is_unfinished(run_folder):
        quoted = shlex.quote(name)
        raise RunError(
            f"{name} holds a run that is not finished; resume it with `omnidraft replay --resume {quoted}` (that of "
            f"a server by `omnidraft serve --resume {quoted}`) or name another folder with --run"
        )
    names = [path.name for path in run_folder.iterdir()] if run_folder.exists() else []
    # What a process leaves that was killed while it created the run counts as nothing.
    if any(one not in (LOCK, OWNER) and not (one.startswith(".") and one.endswith(".tmp")) for one in names):
        raise RunError(f"a run needs a new or empty folder, but {name} holds files; name another with --run")


def is_unfinished(run_folder: Path) -> bool:
    """Return whether the folder holds a run that can be resumed.

    Nothing is written: a run with a lost manifest is refused before its folder is locked or a model is loaded.
    """
    if not (run_folder / CONFIG).is_file():
        return False
    if has_manifest(run_folder) and read_manifest(run_folder).finished:
        return False
    for partition in (run_folder / PARTITIONS).glob("*"):
        has_manifest(partition)
    return True
