"""Repair of a run whose manifest is lost or cannot be read.

Two ways, in this order:

1. *Step back*: the predecessor of the manifest (RUN/log/manifest.previous.json) takes its place, if every file that it
   names has its recorded digest, the checkpoint included. The run resumes from there.
2. *Rebuild*: the parts in the folder are put in order by the numbers of their rows. The log is then finished: no
   checkpoint belongs to it, so it can be read but not resumed.

No file but the manifest is changed, and one that cannot be read is kept as RUN/log/manifest.unreadable.json. What
cannot be proved is listed as a doubt: a part that no readable manifest names has no recorded digest.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from store.errors import CorruptError, OmnidraftError, RunError
from store.files import digest_of
from store.log.checkpoint import read_checkpoint
from store.log.lock import RunLock
from store.log.manifest import (
    MANIFEST,
    PART_NAME,
    PREVIOUS,
    Manifest,
    Part,
    RunKind,
    part_path,
    read_manifest,
    replace_unreadable,
)
from store.log.partitions import LEARNER, PARTITIONS
from store.log.rollups import COUNTS
from store.log.run_log import REJECTED
from store.log.schema import TABLES
from store.outbox import Ledger
from store.recovery.parts_on_disk import FoundPart, read_found_part

QUEUE = "registry-queue.jsonl"


class RepairKind(StrEnum):
    """What a repair did to one log."""

    SOUND = "sound"  # nothing: its manifest can be read
    STEPPED_BACK = "stepped back"
    REBUILT = "rebuilt"


@dataclass(frozen=True)
class LogRepair:
    """Repair of one log of a run.

    Attributes:
        folder: of the run or of its partition.
        kind: what was done.
        manifest: that the log has now.
        doubts: what could not be vouched for, a sentence each.
    """

    folder: Path
    kind: RepairKind
    manifest: Manifest
    doubts: tuple[str, ...] = ()


def repair_run(run_folder: Path, *, all_rows: bool = False) -> list[LogRepair]:
    """Repair the logs of a run and of its partitions; those whose manifests can be read are left as they are.

    Args:
        run_folder: of the run. No other process may write it.
        all_rows: rebuild even if the predecessor is whole, so that rows of the last commit are kept for reading.

    Raises:
        RunError: the folder is no run, another process writes it, or a manifest is of an unknown version.
        CorruptError: a log has no readable part at all.
        OSError: the folder cannot be written.
    """
    folders = [folder for folder in (run_folder, *sorted((run_folder / PARTITIONS).glob("*"))) if _has_log(folder)]
    if run_folder not in folders:
        raise RunError(f"{run_folder} must be a run's folder to be repaired, but has no log; see --run")
    with RunLock(run_folder):
        return [_repair_log(folder, all_rows=all_rows) for folder in folders]


def _has_log(folder: Path) -> bool:
    return (folder / MANIFEST.parent).is_dir()


def _repair_log(folder: Path, *, all_rows: bool) -> LogRepair:
    try:
        return LogRepair(folder, RepairKind.SOUND, read_manifest(folder))
    except CorruptError:
        pass
    except RunError:
        if (folder / MANIFEST).exists():  # of an unknown version, or not a file
            raise
    previous = _read_previous(folder)
    repaired = None if all_rows or previous is None else _step_back(folder, previous)
    repaired = repaired or _rebuild(folder, previous)
    replace_unreadable(folder, repaired.manifest)
    return repaired


def _read_previous(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder, PREVIOUS)
    except OmnidraftError:
        return None


def _step_back(folder: Path, previous: Manifest) -> LogRepair | None:
    """Return the repair by the predecessor; None if it names a changed file, or nothing of what is there."""
    parts = [part for parts in previous.tables.values() for part in parts]
    if any(part_path(folder, part).is_symlink() or digest_of(part_path(folder, part)) != part.sha256 for part in parts):
        return None
    rejected = folder / REJECTED
    if (rejected.stat().st_size if rejected.exists() else 0) < previous.rejected_bytes:
        return None
    if previous.checkpoint:
        try:
            read_checkpoint(folder, previous.checkpoint)
        except CorruptError:
            return None
    named = {part.file for part in parts}
    later = sum(len(_list_parts(folder, table, named)) for table in TABLES if table not in COUNTS)
    if later and not previous.checkpoint and not previous.finished:
        return None  # the beginning of the run: going back there would drop all rows
    doubts = ["the newest manifest is lost: this is its predecessor, and every file that it names has its digest"]
    if later:
        doubts.append(
            f"{later} newer parts are not in it; a resume removes them and makes their rows again where the prompts "
            "can be read again (live requests cannot). To keep them for reading, repair with --all-rows"
        )
    return LogRepair(folder, RepairKind.STEPPED_BACK, previous, tuple(doubts))


def _list_parts(folder: Path, table: str, but: set[str]) -> list[Path]:
    """List the files with names of parts, except those named."""
    paths = sorted((folder / MANIFEST.parent / table).glob("part-*.parquet"))
    return [path for path in paths if re.fullmatch(PART_NAME, path.name) and f"{table}/{path.name}" not in but]


def _rebuild(folder: Path, previous: Manifest | None) -> LogRepair:
    """Make a manifest of the parts in the folder. Raises CorruptError if there is none that can be read."""
    recorded = {part.file: part.sha256 for parts in previous.tables.values() for part in parts} if previous else {}
    doubts: list[str] = []
    tables: dict[str, tuple[Part, ...]] = dict.fromkeys(TABLES, ())
    for table in (table for table in TABLES if table not in COUNTS):
        chosen = choose_parts(_read_parts(folder, table, recorded, doubts))
        doubts += _describe_gaps(table, chosen, previous)
        tables[table] = tuple(found.part for found in chosen)
        if unsure := [found for found in chosen if not found.vouched]:
            rows = sum(found.part.rows for found in unsure)
            doubts.append(f"{table}: {len(unsure)} parts with {rows} rows have no recorded digest; they can be read")
    if not any(tables.values()):
        raise CorruptError(
            f"{folder} must hold a part that can be read to be repaired, but has none; restore the run from a copy"
        )
    tables |= _find_counts(folder, tables["decisions"], recorded)
    if not previous:
        doubts.append("the run's identity is lost; it has a new one, by which MLflow does not know it")
    doubts.append("rows that no commit named may be among them, and the log is finished: it cannot be resumed")
    manifest = previous or Manifest.empty(folder.resolve().name, _kind_of(folder))
    manifest = replace(
        manifest,
        tables=MappingProxyType(tables),
        checkpoint=None,
        finished=True,
        messages=Ledger.read(folder / QUEUE).next_id,
        rejected_bytes=(folder / REJECTED).stat().st_size if (folder / REJECTED).exists() else 0,
    )
    return LogRepair(folder, RepairKind.REBUILT, manifest, tuple(doubts))


def _kind_of(folder: Path) -> RunKind:
    """Return the kind of the process that wrote a log, as far as its folder shows it."""
    if folder.parent.name != PARTITIONS:
        return RunKind.REPLAY
    return RunKind.LEARNER if folder.name == LEARNER else RunKind.WORKER


def _read_parts(folder: Path, table: str, recorded: Mapping[str, str], doubts: list[str]) -> list[FoundPart]:
    """Read the parts of a table; those that are not as they were committed are left out, with a doubt."""
    found: list[FoundPart] = []
    for path in _list_parts(folder, table, set()):
        try:
            found.append(read_found_part(path, table, recorded.get(f"{table}/{path.name}")))
        except CorruptError as error:
            doubts.append(f"left out: {error}")
    return found


def choose_parts(found: Sequence[FoundPart]) -> list[FoundPart]:
    """Choose parts that together have each row once, in order.

    A compaction leaves the parts that it joined in place for some time: of parts that begin with the same row, the
    longest is taken, and those that it covers are left out.
    """
    chosen: list[FoundPart] = []
    end = 0
    for part in sorted(found, key=lambda part: (part.first_seq, -part.part.rows, not part.vouched)):
        if part.first_seq >= end:
            chosen.append(part)
            end = part.end_seq
    return chosen


def _describe_gaps(table: str, chosen: Sequence[FoundPart], previous: Manifest | None) -> list[str]:
    """Describe rows that are missing before, between and, as far as the predecessor shows it, after the parts."""
    doubts: list[str] = []
    end = 0
    for found in chosen:
        if found.first_seq > end:
            doubts.append(f"{table}: rows {end} to {found.first_seq - 1} are missing")
        end = found.end_seq
    committed = sum(part.rows for part in previous.tables[table]) if previous else 0
    return [*doubts, f"{table}: rows {end} to {committed - 1} are missing"] if end < committed else doubts


def _find_counts(folder: Path, decisions: Sequence[Part], recorded: Mapping[str, str]) -> dict[str, tuple[Part, ...]]:
    """Return the counts of the chosen parts of decisions, where all tables of counts have them.

    Counts without a recorded digest are left out: readers count again.
    """
    names = [Path(part.file).name for part in decisions]
    counts: dict[str, list[Part]] = {table: [] for table in COUNTS}
    for name in names:
        files = {table: f"{table}/{name}" for table in COUNTS}
        if not all(file in recorded for file in files.values()):
            continue
        try:
            parts = {
                table: read_found_part(folder / MANIFEST.parent / file, table, recorded[file]).part
                for table, file in files.items()
            }
        except CorruptError:
            continue
        for table, part in parts.items():
            counts[table].append(part)
    return {table: tuple(parts) for table, parts in counts.items()}
