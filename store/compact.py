"""Joining small parts of a log into large ones, beside its readers and the run that writes.

A run leaves a part every few seconds. Neighbours are joined into one part, the order of rows and their `seq` kept, and
the decisions of a large joined part are counted (store/rollups.py). One edit of the manifest puts it and its
counts in the place of those that it was made of. Their files stay for readers that opened the log before; a later
compaction removes them once they were replaced for longer than the grace time.

    RUN/log/decisions/part-000003-000007.parquet            made of parts 3 to 7
    RUN/log/counts_by_token/part-000003-000007.parquet      its counts
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from store.errors import OmnidraftError, RunError
from store.files import digest_of, sync_folder
from store.manifest import LOCK_SECONDS, MANIFEST, Manifest, Part, edit_manifest, part_path, read_manifest
from store.partitions import log_folders
from store.parts import last_number, newest_number, parquet_bytes, part_of
from store.rollups import COUNTS, roll_up
from store.schema import SMALL_LEVEL, TABLES, schema_of

JOINED_ROWS = 1_000_000
COUNTED_ROWS = 100_000  # fewer are counted as quickly when they are asked for, and in less space
JOINED_BYTES = 64 << 20  # of the parts that are joined: texts of prompts are large
GRACE_SECONDS = 3600.0
_LOCK = ".compaction.lock"
_TEMPORARY = ".joining-"


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did, or would do. Counts are not among the parts, but are among the bytes."""

    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int | None  # None where nothing was written
    removed: int  # files that an earlier compaction replaced
    damaged: tuple[Path, ...]  # left as they are

    def __add__(self, other: "Compaction") -> "Compaction":
        after = None if self.bytes_after is None or other.bytes_after is None else self.bytes_after + other.bytes_after
        return Compaction(
            self.parts_before + other.parts_before,
            self.parts_after + other.parts_after,
            self.bytes_before + other.bytes_before,
            after,
            self.removed + other.removed,
            self.damaged + other.damaged,
        )


@dataclass(frozen=True, slots=True)
class _Joined:
    """A joined part that is written under temporary names."""

    table: str
    sources: tuple[Part, ...]
    parts: Mapping[str, Part]  # by table: its own, and the counts of decisions


def compact(
    run_folder: Path,
    *,
    rows: int = JOINED_ROWS,
    counted: int = COUNTED_ROWS,
    grace: float = GRACE_SECONDS,
    dry_run: bool = False,
) -> Compaction:
    """Join the small parts of a run's logs; remove what was replaced more than `grace` seconds ago.

    Args:
        run_folder: of the run, finished or not. Its partitions are joined each for itself.
        rows: most rows of a joined part. What has more than half of that stays as it is.
        counted: fewest decisions of a joined part that is counted.
        grace: for how long a reader may go on with a log as it was when it opened it.
        dry_run: change nothing.

    A damaged part stays where it is and is named in the result. Raises `RunError` for a folder that is no run, and
    while another compaction works on it; `OmnidraftError` when the disk refuses, the log is then as sound as before.
    """
    logs = [_compact_log(folder, rows, counted, grace, dry_run) for folder in log_folders(run_folder)]
    return reduce(Compaction.__add__, logs)


def _compact_log(run_folder: Path, rows: int, counted: int, grace: float, dry_run: bool) -> Compaction:
    before = read_manifest(run_folder)
    folder = run_folder / MANIFEST.parent
    if dry_run:
        groups, damaged = _plan(run_folder, before, rows)
        saved = sum(len(group) - 1 for _, group in groups)
        return Compaction(_count(before), _count(before) - saved, _bytes(before), None, 0, damaged)
    try:
        with _alone(run_folder):
            before = read_manifest(run_folder)  # another compaction may have ended since
            removed = _remove_replaced(folder, before, grace)
            groups, damaged = _plan(run_folder, before, rows)
            for table, group in groups:
                _put_in_place(run_folder, _join(run_folder, table, group, counted))
    except Timeout as error:
        raise RunError(
            f"the manifest of {run_folder} must be free within {LOCK_SECONDS:g} s, but another process holds "
            f"{error.lock_file}; what was joined so far counts, compact again"
        ) from None
    except OSError as error:
        raise OmnidraftError(
            f"the parts below {run_folder} must be readable and the folder writable, but: {error}; what was joined so "
            "far counts, the rest is as it was. Free the disk, then compact again"
        ) from error
    after = read_manifest(run_folder)
    return Compaction(_count(before), _count(after), _bytes(before), _bytes(after), removed, damaged)


def _alone(run_folder: Path) -> AbstractContextManager[object]:
    """The lock that only one compaction of a run can hold. Raises `RunError` where another one does."""
    try:
        return FileLock(run_folder / MANIFEST.parent / _LOCK).acquire(timeout=0)
    except Timeout:
        raise RunError(
            f"{run_folder} must have one compaction at a time, but another is at work; wait for it"
        ) from None


def _plan(
    run_folder: Path, manifest: Manifest, rows: int
) -> tuple[list[tuple[str, tuple[Part, ...]]], tuple[Path, ...]]:
    """Groups of neighbours to join, each with its table, and damaged parts among those that were looked at."""
    groups: list[tuple[str, tuple[Part, ...]]] = []
    damaged: list[Path] = []
    for table in TABLES:
        if table not in COUNTS:
            for stretch in _small(manifest.tables[table], rows):
                sound = [digest_of(part_path(run_folder, part)) == part.sha256 for part in stretch]
                damaged += [part_path(run_folder, part) for part, well in zip(stretch, sound, strict=True) if not well]
                groups += [(table, group) for group in _groups(stretch, sound, rows)]
    return groups, tuple(damaged)


def _small(parts: Sequence[Part], rows: int) -> Iterator[list[Part]]:
    """Stretches of neighbours that are small enough to be joined; those of one part too."""
    stretch: list[Part] = []
    for part in parts:
        if part.rows > rows // 2 or part.bytes > JOINED_BYTES // 2:
            yield stretch
            stretch = []
        else:
            stretch.append(part)
    yield stretch


def _groups(stretch: Sequence[Part], sound: Sequence[bool], rows: int) -> Iterator[tuple[Part, ...]]:
    """As many neighbours at a time as one part may be made of; a damaged one ends a group."""
    group: list[Part] = []
    for part, well in [*zip(stretch, sound, strict=True), (None, False)]:
        full = part is not None and _too_large([*group, part], rows)
        if (full or not well) and len(group) > 1:
            yield tuple(group)
        if full or not well:
            group = []
        if part is not None and well:
            group.append(part)


def _too_large(group: Sequence[Part], rows: int) -> bool:
    return sum(part.rows for part in group) > rows or sum(part.bytes for part in group) > JOINED_BYTES


def _join(run_folder: Path, table: str, sources: tuple[Part, ...], counted: int) -> _Joined:
    """Write the joined part and its counts under temporary names."""
    read = (pq.read_table(part_path(run_folder, part), partitioning=None) for part in sources)
    rows = pa.concat_tables([one.cast(schema_of(table)) for one in read]).unify_dictionaries()
    first, last = sources[0].file.removesuffix(".parquet").split("-")[1], last_number(sources[-1].file)
    name = f"part-{first}-{last:06d}.parquet"
    made = {table: rows}
    if table == "decisions" and rows.num_rows >= counted:
        made |= counts_of(rows)
    return _Joined(table, sources, {one: _write(run_folder, one, name, of) for one, of in made.items()})


def counts_of(decisions: pa.Table) -> dict[str, pa.Table]:
    """The counts of some decisions, by table, with its columns and types; `seq` counts within the part."""
    made = {}
    for table, rows in roll_up(decisions).items():
        schema = schema_of(table)
        made[table] = rows.append_column("seq", pa.arange(0, rows.num_rows)).select(schema.names).cast(schema)
    return made


def _write(run_folder: Path, table: str, name: str, rows: pa.Table) -> Part:
    content = parquet_bytes(table, rows, SMALL_LEVEL)
    folder = run_folder / MANIFEST.parent / table
    folder.mkdir(exist_ok=True)  # logs of version 3 have none for counts
    with open(folder / f"{_TEMPORARY}{name}", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return part_of(f"{table}/{name}", rows, content)


def _put_in_place(run_folder: Path, joined: _Joined) -> None:
    """Name the joined part where its sources are named. Its files get their names under the manifest's lock."""
    folder = run_folder / MANIFEST.parent

    def replaced(manifest: Manifest) -> Manifest:
        tables = dict(manifest.tables)
        tables[joined.table] = _replaced(tables[joined.table], joined.sources, joined.parts[joined.table])
        names = {Path(part.file).name for part in joined.sources}
        dropped = list(joined.sources)
        for table in COUNTS if joined.table == "decisions" else ():
            kept = [part for part in tables[table] if Path(part.file).name not in names]
            dropped += [part for part in tables[table] if Path(part.file).name in names]
            tables[table] = (*kept, *([joined.parts[table]] if table in joined.parts else []))
        for part in dropped:
            with suppress(FileNotFoundError):  # counts that are missing are no reason to stop
                os.utime(folder / part.file)  # the grace time begins
        for table, part in joined.parts.items():
            final = folder / part.file
            os.replace(final.with_name(f"{_TEMPORARY}{final.name}"), final)
            sync_folder(folder / table)
        return replace(manifest, tables=MappingProxyType(tables))

    edit_manifest(run_folder, replaced)


def _replaced(parts: tuple[Part, ...], sources: tuple[Part, ...], joined: Part) -> tuple[Part, ...]:
    begin = parts.index(sources[0]) if sources[0] in parts else len(parts)
    if parts[begin : begin + len(sources)] != sources:
        raise RunError(
            f"{sources[0].file} and what follows must still be named by the manifest, but it was changed; compact again"
        )
    return (*parts[:begin], joined, *parts[begin + len(sources) :])


def _remove_replaced(folder: Path, manifest: Manifest, grace: float) -> int:
    """Remove what an earlier compaction replaced or did not finish.

    Parts that a run has written and not yet committed have higher numbers than any that is named: they stay.
    """
    removed = 0
    oldest = time.time() - grace
    for table, parts in manifest.tables.items():
        named = {folder / part.file for part in parts}
        newest = newest_number(manifest.tables, table)
        for path in _files(folder / table):
            replaced = path not in named and last_number(path.name) <= newest and path.stat().st_mtime < oldest
            if path.name.startswith(_TEMPORARY) or replaced:
                path.unlink()
                removed += 1
    return removed


def _files(folder: Path) -> Iterable[Path]:
    return [*folder.glob("part-*.parquet"), *folder.glob(f"{_TEMPORARY}part-*.parquet")]


def _count(manifest: Manifest) -> int:
    return sum(len(parts) for table, parts in manifest.tables.items() if table not in COUNTS)


def _bytes(manifest: Manifest) -> int:
    return sum(part.bytes for parts in manifest.tables.values() for part in parts)
