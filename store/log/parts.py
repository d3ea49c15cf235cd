"""Write events as Parquet parts. A part is not visible before the manifest names it."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.files import write_whole
from store.log.manifest import MANIFEST, Part, part_path
from store.log.rollups import COUNTS
from store.log.schema import QUICK_LEVEL, TABLES, LoggedEvent, parquet_options, schema_of, to_table

ROW_GROUP_ROWS = 122_880  # as DuckDB


class PartWriter:
    """Writes the parts of one log; used by one thread.

    Args:
        run_folder: the run's folder.
        before: the parts that are already committed, by table.
    """

    def __init__(self, run_folder: Path, before: Mapping[str, Sequence[Part]]) -> None:
        self._folder = run_folder / MANIFEST.parent
        self._new: dict[str, list[Part]] = {table: [] for table in TABLES}
        self._rows = {table: sum(part.rows for part in before[table]) for table in TABLES}
        self._numbers = {table: highest_number(before[table]) for table in TABLES}

    def write(self, table: str, events: Sequence[LoggedEvent]) -> None:
        """Write these events as one part; their numbers follow those of the previous part."""
        self._numbers[table] += 1
        name = f"{table}/part-{self._numbers[table]:06d}.parquet"
        rows = to_table(table, self._rows[table], events)
        content = parquet_bytes(table, rows)
        write_whole(self._folder / name, content)
        self._new[table].append(part_of(name, rows, content))
        self._rows[table] += len(events)

    def take(self) -> Mapping[str, tuple[Part, ...]]:
        """Return the parts written since the last call, by table."""
        taken = {table: tuple(parts) for table, parts in self._new.items()}
        self._new = {table: [] for table in TABLES}
        return taken


def parquet_bytes(table: str, rows: pa.Table, level: int = QUICK_LEVEL) -> bytes:
    """Encode rows as the file of a part, with the table's name and the schema version in its metadata."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **parquet_options(table, level)) as writer:
        writer.write_table(rows, ROW_GROUP_ROWS)
        writer.add_key_value_metadata({key.decode(): text.decode() for key, text in schema_of(table).metadata.items()})
    return bytes(sink.getvalue())


def part_of(name: str, rows: pa.Table, content: bytes) -> Part:
    """Build the manifest's entry of a file from its name in the log's folder, its rows and its content."""
    offsets = pc.min_max(rows["offset"]).as_py()
    digest = hashlib.sha256(content).hexdigest()
    return Part(name, rows.num_rows, len(content), digest, offsets["min"], offsets["max"])


def read_part(run_folder: Path, part: Part, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows of a part, with all columns or a selection."""
    return pq.read_table(part_path(run_folder, part), columns=columns, partitioning=None)


def highest_number(parts: Sequence[Part]) -> int:
    """Return the number of the newest part, or 0; `part-000003-000007.parquet` joins parts 3 to 7."""
    return max((last_number(part.file) for part in parts), default=0)


def newest_number(tables: Mapping[str, Sequence[Part]], table: str) -> int:
    """Return the highest number of a committed part of the table; counts have the numbers of decisions."""
    return highest_number(tables["decisions" if table in COUNTS else table])


def last_number(file: str) -> int:
    """Return the number of a part; for a joined part, that of its last source."""
    return int(Path(file).stem.rpartition("-")[2])
