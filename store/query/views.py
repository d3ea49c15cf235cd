"""SQL of the store: the views over committed parts, and the statements and recipes in `store/query/sql/`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pyarrow as pa

from store.errors import CorruptError
from store.files import find_plain_path
from store.log.manifest import Part, RunKind, part_path
from store.log.partitions import read_manifests
from store.log.parts import find_damage
from store.log.schema import COUNTS, KEYS, TABLES, schema_of

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
    """The committed files of one run that a reader reads, including those of its partitions."""

    name: str  # of the run
    parts: list[tuple[Path, Part]]  # with the folders of their logs
    paths: dict[str, list[str]]  # of these parts, by table
    uncounted: list[str]  # paths of the parts of decisions that have no counts
    damaged: list[Path]  # parts that were left out
    by_engine: bool = False  # whether another engine decided, whose random numbers are not known

    @classmethod
    def from_run(cls, run_folder: Path, skip_damaged: bool) -> "CommittedFiles":
        """Collect the files of a run. Raises `CorruptError` for a damaged one, unless these are left out."""
        manifests = read_manifests(run_folder)
        parts = [
            (folder, part)
            for folder, manifest in manifests.items()
            for of_table in manifest.tables.values()
            for part in of_table
        ]
        damaged = find_damage(parts)
        if damaged and not skip_damaged:
            raise CorruptError(describe_damage(damaged.values()))
        sound = [named for named in parts if part_path(*named) not in damaged]
        by_engine = any(manifest.kind is RunKind.ENGINE for manifest in manifests.values())
        found = cls(run_folder.name, sound, {table: [] for table in TABLES}, [], list(damaged), by_engine)
        for folder in manifests:
            found._add(folder, [part for other, part in sound if other == folder])
        return found

    def _add(self, folder: Path, parts: Sequence[Part]) -> None:
        """Add one of the run's logs. Counts belong to the part of decisions with the same name in the same log."""
        plain = find_plain_path(folder, "*?[")  # DuckDB would read others as patterns
        names: dict[str, set[str]] = {table: set() for table in TABLES}
        for table, name in (part.file.split("/") for part in parts):
            names[table].add(name)
        counted = set.intersection(*(names[table] for table in COUNTS)) & names["decisions"]
        for part in parts:
            table, name = part.file.split("/")
            path = str(part_path(plain, part))
            if table not in COUNTS or name in counted:
                self.paths[table].append(path)
            if table == "decisions" and name not in counted:
                self.uncounted.append(path)


def describe_damage(found: Iterable[str]) -> str:
    """Describe damaged parts in one message."""
    first, *others = found
    more = f" ({len(others)} more files are damaged, which `omnidraft check` names)" if others else ""
    return f"{first}{more}; restore it from a copy, or read the rest with --skip-damaged"


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in alphabetical order."""
    names = sorted(file.name.removesuffix(".sql") for file in files("store.query").joinpath("sql").iterdir())
    texts = {name: statement(name) for name in names if not name.startswith("_")}
    return {name: Recipe(name, sql.splitlines()[0].removeprefix("--").strip(), sql) for name, sql in texts.items()}


def statement(name: str) -> str:
    """Return the text of `store/query/sql/NAME.sql`; names with a leading underscore are not recipes."""
    return files("store.query").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


def view_definitions(runs: Sequence[CommittedFiles]) -> Iterable[str]:
    """Yield the CREATE VIEW statements of the tables; a view is empty if no run has rows of it."""
    for table in TABLES:
        columns = ", ".join(f'NULL::{_sql_type(field.type)} AS "{field.name}"' for field in schema_of(table))
        selects = [f"SELECT NULL::VARCHAR AS run, {columns} WHERE false"]
        selects += [_select_from_parts(run.name, run.paths[table]) for run in runs if run.paths[table]]
        uncounted = [_select_from_parts(run.name, run.uncounted) for run in runs if run.uncounted]
        if table in COUNTS and uncounted:
            rows = " UNION ALL BY NAME ".join(uncounted)
            selects.append(f"(WITH decisions AS ({rows}) {statement(f'_{table}')})")
        yield f"CREATE VIEW {table} AS {' UNION ALL BY NAME '.join(selects)}"
    names = quote_list(run.name for run in runs if run.by_engine)
    yield f"CREATE VIEW engine_runs AS SELECT unnest({names}::VARCHAR[]) AS run"
    yield statement("_views")


def readable_paths(runs: Sequence[CommittedFiles]) -> list[str]:
    """Return the paths that DuckDB must be allowed to read."""
    return sorted(path for run in runs for of_table in run.paths.values() for path in of_table)


def miscounts_query() -> str:
    """Return a query for combinations of keys whose stored count differs from the decisions."""
    return " UNION ALL ".join(map(_miscounts, COUNTS)) + " ORDER BY counts, run, of"


def quote_text(text: str) -> str:
    """Return `text` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


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


def _select_from_parts(run: str, paths: Sequence[str]) -> str:
    return f"SELECT {quote_text(run)} AS run, * FROM read_parquet({quote_list(paths)})"


def _sql_type(arrow_type: pa.DataType) -> str:
    if pa.types.is_list(arrow_type):
        return f"{_sql_type(arrow_type.value_type)}[]"
    if pa.types.is_dictionary(arrow_type):
        return _sql_type(arrow_type.value_type)
    return _SQL_TYPES[arrow_type]
