"""Join small parts of a log into large ones, while others read the log and the run writes it.

A run writes a part every few seconds. Compaction joins neighbouring parts into one, keeps the order of rows and their
`seq`, and counts the decisions of a large joined part (store/log/schema.py). One edit of the manifest replaces the
source parts by the joined part and its counts. The source files stay for readers that opened the log before; a later
compaction removes them after the grace time.

    RUN/log/decisions/part-000003-000007.parquet            parts 3 to 7, joined
    RUN/log/counts_by_token/part-000003-000007.parquet      its counts
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout

from store.errors import OmnidraftError, RunError
from store.events import Outcome
from store.files import sync_folder, write_synced
from store.log.manifest import (
    LOCK_SECONDS,
    MANIFEST,
    Manifest,
    Part,
    edit_manifest,
    part_path,
    read_manifest,
    replace_previous,
)
from store.log.partitions import log_folders
from store.log.parts import find_damage, last_number, newest_number, parquet_bytes, part_of, read_part
from store.log.schema import COUNTS, KEYS, MEASURES, SMALL_LEVEL, schema_of

JOINED_ROWS = 1_000_000
COUNTED_ROWS = 100_000  # fewer are counted as quickly by a query, and take less space
JOINED_BYTES = 64 << 20  # of all parts that are joined into one: texts of prompts are large
GRACE_SECONDS = 3600.0
_LOCK = ".compaction.lock"
_TEMPORARY = ".joining-"


@dataclass(frozen=True, slots=True)
class Compaction:
    """Result of a compaction. The numbers of parts exclude counts; the bytes include them."""

    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int
    removed: int  # files that an earlier compaction replaced
    damaged: tuple[Path, ...]  # left where they are

    def __add__(self, other: "Compaction") -> "Compaction":
        return Compaction(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def compact(
    run_folder: Path,
    *,
    rows: int = JOINED_ROWS,
    counted: int = COUNTED_ROWS,
    grace: float = GRACE_SECONDS,
) -> Compaction:
    """Join the small parts of a run's logs; remove files that were replaced more than `grace` seconds ago.

    Each partition is compacted separately. A part with more than half of `rows`, the most of a joined part, stays as it
    is, and so does a damaged one, which the result names. Joined parts get counts from `counted` decisions on. Raises
    RunError if another compaction is at work, OmnidraftError if the disk refuses; the log stays valid.
    """
    logs = [_compact_log(folder, rows, counted, grace) for folder in log_folders(run_folder)]
    return reduce(Compaction.__add__, logs)


def _compact_log(run_folder: Path, rows: int, counted: int, grace: float) -> Compaction:
    try:
        with _acquire_lock(run_folder):
            before = read_manifest(run_folder)
            removed = _remove_replaced(run_folder, before, grace)
            groups, damaged = _plan(run_folder, before, rows)
            for table, group in groups:
                _commit_joined(run_folder, table, group, _join(run_folder, table, group, counted))
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


def _acquire_lock(run_folder: Path) -> AbstractContextManager[object]:
    """Acquire the lock of compactions of a run. Raises `RunError` if another compaction holds it."""
    try:
        return FileLock(run_folder / MANIFEST.parent / _LOCK).acquire(timeout=0)
    except Timeout:
        raise RunError(
            f"{run_folder} must have one compaction at a time, but another is at work; wait for it"
        ) from None


def _plan(
    run_folder: Path, manifest: Manifest, rows: int
) -> tuple[list[tuple[str, tuple[Part, ...]]], tuple[Path, ...]]:
    """Return groups of neighbours to join, each with its table, and the damaged parts found."""
    tables = {table: parts for table, parts in manifest.tables.items() if table not in COUNTS}
    every = [part for parts in tables.values() for part in parts]
    small = [part for part in every if part.rows <= rows // 2 and part.bytes <= JOINED_BYTES // 2]
    damaged = find_damage((run_folder, part) for part in small)
    sound = {part for part in small if part_path(run_folder, part) not in damaged}
    groups: list[tuple[str, tuple[Part, ...]]] = []
    for table, parts in tables.items():
        group: tuple[Part, ...] = ()
        for part in parts:
            if part not in sound or _is_too_large([*group, part], rows):
                groups.append((table, group))
                group = ()
            if part in sound:
                group = (*group, part)
        groups.append((table, group))
    return [(table, group) for table, group in groups if len(group) > 1], tuple(damaged)


def _is_too_large(group: Sequence[Part], rows: int) -> bool:
    return sum(part.rows for part in group) > rows or sum(part.bytes for part in group) > JOINED_BYTES


def _join(run_folder: Path, table: str, sources: tuple[Part, ...], counted: int) -> dict[str, Part]:
    """Write the joined part, and its counts if it has many decisions, under temporary names; return them by table."""
    rows = pa.concat_tables(read_part(run_folder, part) for part in sources).unify_dictionaries()
    first, last = sources[0].file.removesuffix(".parquet").split("-")[1], last_number(sources[-1].file)
    name = f"part-{first}-{last:06d}.parquet"
    made = {table: rows}
    if table == "decisions" and rows.num_rows >= counted:
        made |= count_decisions(rows)
    return {one: _write(run_folder, one, name, of) for one, of in made.items()}


def _write(run_folder: Path, table: str, name: str, rows: pa.Table) -> Part:
    content = parquet_bytes(table, rows, SMALL_LEVEL)
    folder = run_folder / MANIFEST.parent / table
    write_synced(folder / f"{_TEMPORARY}{name}", [content])
    return part_of(f"{table}/{name}", rows, content)


def _commit_joined(run_folder: Path, joined: str, sources: tuple[Part, ...], made: Mapping[str, Part]) -> None:
    """Replace the sources by the joined part in the manifest. Its files are renamed under the manifest's lock."""
    folder = run_folder / MANIFEST.parent

    def replace_parts(manifest: Manifest) -> Manifest:
        tables = dict(manifest.tables)
        tables[joined] = _replace_sources(tables[joined], sources, made[joined])
        names = {Path(part.file).name for part in sources}
        dropped = list(sources)
        for table in COUNTS if joined == "decisions" else ():
            kept = [part for part in tables[table] if Path(part.file).name not in names]
            dropped += [part for part in tables[table] if Path(part.file).name in names]
            tables[table] = (*kept, *([made[table]] if table in made else []))
        for part in dropped:
            with suppress(FileNotFoundError):  # missing counts are not an error
                os.utime(folder / part.file)  # the grace time begins
        for table, part in made.items():
            final = folder / part.file
            os.replace(final.with_name(f"{_TEMPORARY}{final.name}"), final)
            sync_folder(folder / table)
        return replace(manifest, tables=MappingProxyType(tables))

    edit_manifest(run_folder, replace_parts)


def _replace_sources(parts: tuple[Part, ...], sources: tuple[Part, ...], joined: Part) -> tuple[Part, ...]:
    begin = parts.index(sources[0]) if sources[0] in parts else len(parts)
    if parts[begin : begin + len(sources)] != sources:
        raise RunError(
            f"{sources[0].file} and what follows must still be named by the manifest, but it was changed; compact again"
        )
    return (*parts[:begin], joined, *parts[begin + len(sources) :])


def _remove_replaced(run_folder: Path, manifest: Manifest, grace: float) -> int:
    """Remove files that an earlier compaction replaced or left unfinished; return how many.

    Parts that a run has written but not committed have higher numbers than any part in the manifest: they stay. The
    previous manifest may name replaced parts, so it is replaced first.
    """
    oldest, gone = time.time() - grace, list[Path]()
    for table, parts in manifest.tables.items():
        folder = run_folder / MANIFEST.parent / table
        named, newest = {part_path(run_folder, part) for part in parts}, newest_number(manifest.tables, table)
        gone += folder.glob(f"{_TEMPORARY}part-*.parquet")
        gone += [
            path
            for path in folder.glob("part-*.parquet")
            if path not in named and last_number(path.name) <= newest and path.stat().st_mtime < oldest
        ]
    if gone:
        replace_previous(run_folder)
    for path in gone:
        path.unlink()
    return len(gone)


def _count(manifest: Manifest) -> int:
    return sum(len(parts) for table, parts in manifest.tables.items() if table not in COUNTS)


def _bytes(manifest: Manifest) -> int:
    return sum(part.bytes for parts in manifest.tables.values() for part in parts)


def count_decisions(decisions: pa.Table) -> dict[str, pa.Table]:
    """Count decisions into the tables of counts, with their columns and types; `seq` counts within the part."""
    outcomes = pa.array([Outcome.ACCEPTED.value, Outcome.REJECTED.value])
    judged = decisions.filter(pc.is_in(decisions["outcome"].cast(pa.string()), outcomes))
    places = decisions.append_column("pieces_count", pc.list_value_length(decisions["pieces"]))
    for side in ("drafter", "target"):
        levels = decisions[f"{side}_levels"]
        filled = pc.if_else(pc.equal(pc.list_value_length(levels), 0), None, levels)  # null for an empty list
        places = places.append_column(f"{side}_level", pc.list_element(filled, 0).cast(pa.float64()))
    return {
        "counts_by_version": _count_groups(decisions, "counts_by_version"),
        "counts_by_place": _count_groups(places, "counts_by_place"),
        "counts_by_token": _count_groups(judged, "counts_by_token"),
    }


def _count_groups(decisions: pa.Table, table: str) -> pa.Table:
    """Return one row per combination of keys, in the order of first occurrence."""
    measures, schema = MEASURES[table], schema_of(table)
    grouped = decisions.group_by(list(KEYS[table]), use_threads=False)
    counts = grouped.aggregate([([], "count_all"), *measures.values()])
    renamed = {f"{column}_{how}": name for name, (column, how) in measures.items()} | {"count_all": "decisions"}
    rows = counts.rename_columns([renamed.get(name, name) for name in counts.schema.names])
    return rows.append_column("seq", pa.arange(0, rows.num_rows)).select(schema.names).cast(schema)
