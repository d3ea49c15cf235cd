"""Events to Parquet parts; nobody sees a part before the manifest names it."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.files import write_whole
from store.manifest import MANIFEST, Part
from store.rollups import COUNTS
from store.schema import QUICK_LEVEL, TABLES, LoggedEvent, parquet_options, schema_of, to_table

ROW_GROUP_ROWS = 122_880  # DuckDB's own


class PartWriter:
    """Writes the parts of one log; used by one thread.

    Args:
        run_folder: the run's.
        before: the parts that are committed already, by table.
    """

    def __init__(self, run_folder: Path, before: Mapping[str, Sequence[Part]]) -> None:
        self._folder = run_folder / MANIFEST.parent
        self._new: dict[str, list[Part]] = {table: [] for table in TABLES}
        self._rows = {table: sum(part.rows for part in before[table]) for table in TABLES}
        self._numbers = {table: highest_number(before[table]) for table in TABLES}

    def write(self, table: str, events: Sequence[LoggedEvent]) -> None:
        """Write one part of these events, which follow those written before."""
        self._numbers[table] += 1
        name = f"{table}/part-{self._numbers[table]:06d}.parquet"
        rows = to_table(table, self._rows[table], events)
        content = parquet_bytes(table, rows)
        write_whole(self._folder / name, content)
        self._new[table].append(part_of(name, rows, content))
        self._rows[table] += len(events)

    def take(self) -> Mapping[str, tuple[Part, ...]]:
        """The parts written since the last call, by table."""
        taken = {table: tuple(parts) for table, parts in self._new.items()}
        self._new = {table: [] for table in TABLES}
        return taken


def parquet_bytes(table: str, rows: pa.Table, level: int = QUICK_LEVEL) -> bytes:
    """The file of a part: these rows, in `table`'s encodings, with its name and the schema version in its metadata."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **parquet_options(table, level)) as writer:
        writer.write_table(rows, ROW_GROUP_ROWS)
        writer.add_key_value_metadata({key.decode(): text.decode() for key, text in schema_of(table).metadata.items()})
    return bytes(sink.getvalue())


def part_of(name: str, rows: pa.Table, content: bytes) -> Part:
    """What the manifest says of a file: its name in the log's folder, the rows in it, and its bytes."""
    offsets = pc.min_max(rows["offset"]).as_py()
    digest = hashlib.sha256(content).hexdigest()
    return Part(name, rows.num_rows, len(content), digest, offsets["min"], offsets["max"])


def highest_number(parts: Sequence[Part]) -> int:
    """The number of the newest part, 0 if there is none; `part-000003-000007.parquet` is of parts 3 to 7."""
    return max((last_number(part.file) for part in parts), default=0)


def newest_number(tables: Mapping[str, Sequence[Part]], table: str) -> int:
    """The highest number that a part of the table may have and be committed. Counts belong to parts of decisions."""
    return highest_number(tables["decisions" if table in COUNTS else table])


def last_number(file: str) -> int:
    """The number of a part, of a joined one that of its last."""
    return int(Path(file).stem.rpartition("-")[2])
