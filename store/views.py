"""The views over committed parts, as SQL."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from store.errors import CorruptError
from store.files import digest_of
from store.manifest import Manifest, Part, part_path
from store.partitions import read_manifests
from store.plain import quoted
from store.recipes import statement
from store.rollups import COUNTS, KEYS
from store.schema import TABLES, schema_of

VIEWS = ("decisions", "tokens", "blocks", "prompts", "updates", "drifts", "recalls", "versions", *COUNTS)

_SQL_TYPES = {
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
}

Parts = Mapping[str, list[Part]]  # by table


@dataclass(frozen=True, slots=True)
class CommittedFiles:
    """What a reader reads of one run, its partitions included.

    Attributes:
        name: the run's.
        paths: of the parts that are there, by table.
        uncounted: those of the decisions' parts that have no counts beside them.
        damaged: parts that were left out.
    """

    name: str
    paths: dict[str, list[str]]
    uncounted: list[str]
    damaged: list[Path]

    @classmethod
    def of(cls, run_folder: Path, skip_damaged: bool) -> "CommittedFiles":
        """Of the run in this folder; without `skip_damaged` a part that is missing or cut raises `CorruptError`."""
        found = cls(run_folder.name, {table: [] for table in TABLES}, [], [])
        for folder, manifest in read_manifests(run_folder).items():
            found._add(folder, manifest, skip_damaged)
        return found

    def _add(self, folder: Path, manifest: Manifest, skip_damaged: bool) -> None:
        """One of the run's logs. Names of parts are its own: counts belong to the decisions beside them."""
        sound, damaged = _readable(folder, manifest, skip_damaged)
        counted = set.intersection(*({Path(part.file).name for part in sound[table]} for table in COUNTS))
        there = {Path(part.file).name for part in sound["decisions"]}
        for table, parts in sound.items():
            kept = [part for part in parts if table not in COUNTS or Path(part.file).name in counted & there]
            self.paths[table].extend(str(part_path(folder, part)) for part in kept)
        decisions = [part for part in sound["decisions"] if Path(part.file).name not in counted]
        self.uncounted.extend(str(part_path(folder, part)) for part in decisions)
        self.damaged.extend(damaged)


def definitions(runs: Sequence[CommittedFiles]) -> Iterable[str]:
    """CREATE VIEW statements of the tables, without rows where no run has any."""
    for table in TABLES:
        selects = [_empty_select(table)]
        selects += [_reading(run.name, paths) for run in runs if (paths := run.paths[table])]
        uncounted = [_reading(run.name, run.uncounted) for run in runs if run.uncounted]
        if table in COUNTS and uncounted:
            rows = " UNION ALL BY NAME ".join(uncounted)
            selects.append(f"(WITH decisions AS ({rows}) {statement(f'_{table}')})")
        yield f"CREATE VIEW {table} AS {' UNION ALL BY NAME '.join(selects)}"
    yield statement("_views")


def readable(runs: Sequence[CommittedFiles]) -> list[str]:
    """What DuckDB must be allowed to read for the views: the parts, and the patterns that name them."""
    paths = [path for run in runs for paths in run.paths.values() for path in paths]
    return sorted({*paths, *map(_pattern, paths)})


def miscounts() -> str:
    """A query for combinations whose kept count is not that of the decisions."""
    return " UNION ALL ".join(map(_miscounts, COUNTS)) + " ORDER BY counts, run, of"


def quoted_list(texts: Iterable[str]) -> str:
    """An SQL list of strings."""
    return f"[{', '.join(map(quoted, texts))}]"


def _miscounts(table: str) -> str:
    keys = ", ".join(f'"{key}"' for key in KEYS[table])
    both = (
        f"SELECT run, {keys}, decisions AS kept, 0 AS found FROM {table} "
        f"UNION ALL SELECT run, {keys}, 0, decisions FROM ({statement(f'_{table}')})"
    )
    return (
        f"SELECT '{table}' AS counts, run, to_json(struct_pack({keys}))::VARCHAR AS of, "
        f"sum(kept)::BIGINT AS kept, sum(found)::BIGINT AS found FROM ({both}) "
        f"GROUP BY run, {keys} HAVING sum(kept) <> sum(found)"
    )


def _readable(run_folder: Path, manifest: Manifest, skip_damaged: bool) -> tuple[dict[str, list[Part]], list[Path]]:
    sound: dict[str, list[Part]] = {table: [] for table in TABLES}
    damaged = []
    for table, parts in manifest.tables.items():
        for part in parts:
            path = part_path(run_folder, part)
            if skip_damaged and digest_of(path) != part.sha256:
                damaged.append(path)
                continue
            if not skip_damaged:
                _require_size(path, part.bytes)
            sound[table].append(part)
    return sound, damaged


def _require_size(path: Path, size: int) -> None:
    """Checked by size alone, so that opening is quick; `omnidraft check` reads the digests."""
    try:
        found = path.stat().st_size
    except OSError:
        found = -1
    if found != size:
        raise CorruptError(
            f"{path} must be a file of {size} bytes, as the manifest says, but it "
            f"{'is missing' if found < 0 else f'has {found}'}; restore it, or read the rest with --skip-damaged"
        )


def _reading(run: str, paths: list[str]) -> str:
    return f"SELECT {quoted(run)} AS run, * FROM read_parquet({quoted_list(map(_pattern, paths))})"


def _pattern(path: str) -> str:
    """What `read_parquet` finds this one file by: what is special in patterns stands in brackets."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)


def _empty_select(table: str) -> str:
    """A query without rows that gives a view its columns, also when no run has a part of the table yet."""
    columns = ", ".join(f'NULL::{_sql_type(field.type)} AS "{field.name}"' for field in schema_of(table))
    return f"SELECT NULL::VARCHAR AS run, {columns} WHERE false"


def _sql_type(arrow_type: pa.DataType) -> str:
    if pa.types.is_list(arrow_type):
        return f"{_sql_type(arrow_type.value_type)}[]"
    if pa.types.is_dictionary(arrow_type):
        return _sql_type(arrow_type.value_type)
    return _SQL_TYPES[arrow_type]
