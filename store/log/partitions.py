"""Partitions: the logs of a run that several processes write, each with the layout of a run.

    RUN/log/manifest.json                           the run's own log, of the driver or server
    RUN/partitions/learner/log/manifest.json        the learner: updates, drifts, recalls, versions
    RUN/partitions/worker-000/log/manifest.json     one worker: decisions, blocks, prompts

Readers see a run's own log and those of its partitions as one. All rows of a prompt are in one log, and so are all rows
of the learner; `seq` counts within each log. A worker that died never writes again: its partition is closed, and the
prompts that it had not committed are decoded by another worker, in another partition.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from store.files import sync_folder
from store.log.manifest import (
    Manifest,
    Part,
    RunKind,
    create_log,
    edit_manifest,
    folders_with_manifest,
    has_manifest,
    newest_manifest,
    read_manifest,
)

PARTITIONS = "partitions"
LEARNER = "learner"
_WORKER = "worker-"


def partition_folder(run_folder: Path, name: str) -> Path:
    """Return the folder of the partition with this name."""
    return run_folder / PARTITIONS / name


def partition_folders(run_folder: Path) -> list[Path]:
    """Return the partitions of a run that have a log, sorted by name; none for a run in one process."""
    return folders_with_manifest(run_folder / PARTITIONS)


def worker_folders(run_folder: Path) -> list[Path]:
    """Return the partitions of workers, in the order in which the workers started."""
    return [folder for folder in partition_folders(run_folder) if folder.name.startswith(_WORKER)]


def log_folders(run_folder: Path) -> list[Path]:
    """Return the folders of all logs of a run: its own, even if it does not exist, then its partitions by name."""
    return [run_folder, *partition_folders(run_folder)]


def read_manifests(run_folder: Path) -> dict[Path, Manifest]:
    """Read the manifests of all logs of a run, by folder: workers' before the learner's.

    The learner commits an update before any worker receives it, so every update that a decision names is then there.
    """
    read = {folder: read_manifest(folder) for folder in reversed(log_folders(run_folder))}
    return dict(reversed(read.items()))


def named_parts(run_folder: Path, table: str) -> list[tuple[Path, Part]]:
    """Return the committed parts of a table with the folders of their logs."""
    return [(folder, part) for folder, one in read_manifests(run_folder).items() for part in one.tables[table]]


def committed_at(run_folder: Path) -> float:
    """Return the time of the last commit of any log of the run, in seconds since 1970; 0 if there is no log."""
    times = []
    for folder in log_folders(run_folder):
        with suppress(OSError):
            times.append(newest_manifest(folder).stat().st_mtime)
    return max(times, default=0.0)


def create_worker_partition(run_folder: Path) -> Path:
    """Create the partition of one more worker. Its empty log can be closed before the worker writes to it."""
    number = max((int(folder.name.removeprefix(_WORKER)) for folder in worker_folders(run_folder)), default=-1) + 1
    return open_partition(run_folder, f"{_WORKER}{number:03d}")


def open_partition(run_folder: Path, name: str) -> Path:
    """Return the folder of a partition; create an empty log if it has none. Raises what `has_manifest` raises."""
    folder = partition_folder(run_folder, name)
    if not has_manifest(folder):
        create_log(folder, name, RunKind.LEARNER if name == LEARNER else RunKind.WORKER)
        sync_folder(run_folder)  # which `partitions` is new in
    return folder


def close_partition(folder: Path) -> Manifest:
    """Close a partition to further commits, also those of a process that was wrongly taken for dead; return its
    manifest.
    """
    return edit_manifest(folder, lambda manifest: replace(manifest, finished=True, checkpoint=None))
