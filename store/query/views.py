"""SQL of the store: the views over committed parts, and the statements and recipes in `store/query/sql/`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pyarrow as pa

from store.errors import CorruptError
from store.files import digest_of
from store.log.manifest import Manifest, Part, RunKind, part_path
from store.log.partitions import read_manifests
from store.log.rollups import COUNTS, KEYS
from store.log.schema import SCHEMA_VERSION, TABLES, missing_columns, schema_of
from store.query.json_values import quote_text

Paths = Mapping[int, Sequence[str]]  # of parts of one table, by their schema version

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


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named query that is shipped with the package."""

    name: str
    description: str  # one line
    sql: str


@dataclass(frozen=True, slots=True)
class CommittedFiles:
    """The committed files of one run that a reader reads, including those of its partitions.

    Attributes:
        name: the run's name.
        paths: paths of the parts, by table and schema version.
        uncounted: paths of the parts of decisions that have no counts, by schema version.
        damaged: parts that were left out.
        by_engine: whether another engine decided, whose random numbers are not known.
    """

    name: str
    paths: dict[str, dict[int, list[str]]]
    uncounted: dict[int, list[str]]
    damaged: list[Path]
    by_engine: bool = False

    @classmethod
    def from_run(cls, run_folder: Path, skip_damaged: bool) -> "CommittedFiles":
        """Collect the files of a run. Without `skip_damaged`, raise `CorruptError` for a missing or truncated part."""
        manifests = read_manifests(run_folder)
        by_engine = any(manifest.kind is RunKind.ENGINE for manifest in manifests.values())
        found = cls(run_folder.name, {table: {} for table in TABLES}, {}, [], by_engine)
        for folder, manifest in manifests.items():
            found._add(folder, manifest, skip_damaged)
        return found

    def _add(self, folder: Path, manifest: Manifest, skip_damaged: bool) -> None:
        """Add one of the run's logs. Counts belong to the part of decisions with the same name in the same log."""
        sound: dict[str, list[Part]] = {table: [] for table in TABLES}
        for table, part in ((table, part) for table, parts in manifest.tables.items() for part in parts):
            path = part_path(folder, part)
            if skip_damaged and (path.is_symlink() or digest_of(path) != part.sha256):
                self.damaged.append(path)
                continue
            if not skip_damaged:
                _require_size(path, part.bytes)
            sound[table].append(part)
        counted = set.intersection(*({Path(part.file).name for part in sound[table]} for table in COUNTS))
        there = {Path(part.file).name for part in sound["decisions"]}
        for table, parts in sound.items():
            kept = [part for part in parts if table not in COUNTS or Path(part.file).name in counted & there]
            _add_paths(self.paths[table], table, folder, kept)
        decisions = [part for part in sound["decisions"] if Path(part.file).name not in counted]
        _add_paths(self.uncounted, "decisions", folder, decisions)


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in alphabetical order."""
    names = sorted(file.name.removesuffix(".sql") for file in files("store.query").joinpath("sql").iterdir())
    return {name: _recipe(name) for name in names if not name.startswith("_")}


def statement(name: str) -> str:
    """Return the text of `store/query/sql/NAME.sql`; names with a leading underscore are not recipes."""
    return files("store.query").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def _recipe(name: str) -> Recipe:
    sql = statement(name)
    return Recipe(name, sql.splitlines()[0].removeprefix("--").strip(), sql)


def view_definitions(runs: Sequence[CommittedFiles]) -> Iterable[str]:
    """Yield the CREATE VIEW statements of the tables; a view is empty if no run has rows of it."""
    for table in TABLES:
        selects = [_empty_select(table)]
        selects += [select for run in runs for select in _selects_from_parts(table, run.name, run.paths[table])]
        uncounted = [select for run in runs for select in _selects_from_parts("decisions", run.name, run.uncounted)]
        if table in COUNTS and uncounted:
            rows = " UNION ALL BY NAME ".join(uncounted)
            selects.append(f"(WITH decisions AS ({rows}) {statement(f'_{table}')})")
        yield f"CREATE VIEW {table} AS {' UNION ALL BY NAME '.join(selects)}"
    names = quote_list(run.name for run in runs if run.by_engine)
    yield f"CREATE VIEW engine_runs AS SELECT unnest({names}::VARCHAR[]) AS run"
    yield statement("_views")


def readable_paths(runs: Sequence[CommittedFiles]) -> list[str]:
    """Return the paths that DuckDB must be allowed to read: the parts, and the patterns that name them."""
    paths = [path for run in runs for of in run.paths.values() for paths in of.values() for path in paths]
    return sorted({*paths, *map(_pattern, paths)})


def miscounts_query() -> str:
    """Return a query for combinations of keys whose stored count differs from the decisions."""
    return " UNION ALL ".join(map(_miscounts, COUNTS)) + " ORDER BY counts, run, of"


def quote_list(texts: Iterable[str]) -> str:
    """Return texts as an SQL list of strings."""
    return f"[{', '.join(map(quote_text, texts))}]"


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


def _require_size(path: Path, size: int) -> None:
    """Check a file by its size, so that opening is fast; `omnidraft check` reads the digests.

    A link would let a log read files outside its folder.
    """
    if path.is_symlink():
        raise CorruptError(f"{path} must be a plain file, but is a link; put the file itself in its place")
    try:
        found = path.stat().st_size
    except OSError:
        found = -1
    if found != size:
        raise CorruptError(
            f"{path} must be a file of {size} bytes, as in the manifest, but it "
            f"{'is missing' if found < 0 else f'has {found}'}; restore it, or read the rest with --skip-damaged"
        )


def _add_paths(paths: dict[int, list[str]], table: str, folder: Path, parts: Iterable[Part]) -> None:
    """Add the paths of parts. Versions with all present columns are read together."""
    for part in parts:
        version = part.schema_version if missing_columns(table, part.schema_version) else SCHEMA_VERSION
        paths.setdefault(version, []).append(str(part_path(folder, part)))


def _selects_from_parts(table: str, run: str, paths: Paths) -> Iterator[str]:
    """Yield a SELECT per schema version. Columns that its parts lack, if not null, are constants."""
    for version, named in paths.items():
        missing = {name: value for name, value in missing_columns(table, version).items() if value is not None}
        constants = {name: quote_text(value) if isinstance(value, str) else value for name, value in missing.items()}
        added = "".join(f', {value} AS "{name}"' for name, value in constants.items())
        yield f"SELECT {quote_text(run)} AS run, *{added} FROM read_parquet({quote_list(map(_pattern, named))})"


def _pattern(path: str) -> str:
    """Return the pattern by which `read_parquet` finds this file: special characters are put in brackets."""
    return re.sub(r"[*?\[]", r"[\g<0>]", path)


def _empty_select(table: str) -> str:
    """Return a query without rows that defines a view's columns, even if no run has a part of the table yet."""
    columns = ", ".join(f'NULL::{_sql_type(field.type)} AS "{field.name}"' for field in schema_of(table))
    return f"SELECT NULL::VARCHAR AS run, {columns} WHERE false"


def _sql_type(arrow_type: pa.DataType) -> str:
    if pa.types.is_list(arrow_type):
        return f"{_sql_type(arrow_type.value_type)}[]"
    if pa.types.is_dictionary(arrow_type):
        return _sql_type(arrow_type.value_type)
    return _SQL_TYPES[arrow_type]
