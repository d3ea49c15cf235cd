"""Partitions: the logs of a run that several processes write, each laid out like a run of its own.

    RUN/log/manifest.json                           the run's own log, of the process that leads it
    RUN/partitions/learner/log/manifest.json        what the learner says: updates, drifts, recalls, versions
    RUN/partitions/worker-000/log/manifest.json     what one worker decodes: decisions, blocks, prompts

To a reader a run's own log and those of its partitions are one. All rows of a prompt lie in one of them, and so do all
rows that the learner writes; `seq` counts within each. A worker that died never writes again: its partition is closed,
what it had not committed is decoded by another under another name.
"""

from dataclasses import replace
from pathlib import Path

from store.files import write_whole
from store.manifest import MANIFEST, Manifest, Part, edit_manifest, read_manifest
from store.schema import TABLES

PARTITIONS = "partitions"
LEARNER = "learner"
_WORKER = "worker-"


def partition_folder(run_folder: Path, name: str) -> Path:
    """Where the partition of this name lies."""
    return run_folder / PARTITIONS / name


def partition_folders(run_folder: Path) -> list[Path]:
    """The partitions of a run that have a log, by name; none for a run of one process."""
    return sorted(path.parents[1] for path in (run_folder / PARTITIONS).glob(f"*/{MANIFEST.as_posix()}"))


def worker_folders(run_folder: Path) -> list[Path]:
    """Those of its partitions that are workers', in the order in which they began."""
    return [folder for folder in partition_folders(run_folder) if folder.name.startswith(_WORKER)]


def log_folders(run_folder: Path) -> list[Path]:
    """Every folder with a log of this run: its own first, whether it is there or not, then its partitions by name."""
    return [run_folder, *partition_folders(run_folder)]


def read_manifests(run_folder: Path) -> dict[Path, Manifest]:
    """What a run has committed in all, by the folder of each log. Raises what `read_manifest` raises.

    Workers' manifests are read before the learner's, which commits an update before any worker hears of it: so every
    version that a decision names is there too.
    """
    read = {folder: read_manifest(folder) for folder in reversed(log_folders(run_folder))}
    return dict(reversed(read.items()))


def named_parts(run_folder: Path, table: str) -> list[tuple[Path, Part]]:
    """The committed parts of a table with the folders of their logs. Raises what `read_manifest` raises."""
    return [(folder, part) for folder, one in read_manifests(run_folder).items() for part in one.tables[table]]


def committed_at(run_folder: Path) -> float:
    """When a log of the run was committed last, in seconds since 1970; 0 where there is none."""
    return max((_changed(folder / MANIFEST) for folder in log_folders(run_folder)), default=0.0)


def new_worker(run_folder: Path) -> Path:
    """Make the partition of one more worker, with an empty log that can be closed before anybody writes to it."""
    number = max((int(folder.name.removeprefix(_WORKER)) for folder in worker_folders(run_folder)), default=-1) + 1
    return open_partition(run_folder, f"{_WORKER}{number:03d}")


def open_partition(run_folder: Path, name: str) -> Path:
    """The folder of a partition, with an empty log if it has none yet."""
    folder = partition_folder(run_folder, name)
    if not (folder / MANIFEST).exists():
        for table in TABLES:
            (folder / MANIFEST.parent / table).mkdir(parents=True, exist_ok=True)
        write_whole(folder / MANIFEST, Manifest.empty(name).to_json())
    return folder


def close_partition(folder: Path) -> Manifest:
    """Let nothing be committed to a partition any more, and say what was. May be called again.

    A process that is taken to be dead and is not finds its log finished (see `require_open`).
    """
    return edit_manifest(folder, lambda manifest: replace(manifest, finished=True, checkpoint=None))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
