"""Events to Parquet parts; nobody sees a part before the manifest names it."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from store.files import write_whole
from store.manifest import MANIFEST, Part
from store.schema import TABLES, LoggedEvent, parquet_options, to_table


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
        self._numbers = {table: _highest_number(before[table]) for table in TABLES}

    def write(self, table: str, events: Sequence[LoggedEvent]) -> None:
        """Write one part of these events, which follow those written before."""
        self._numbers[table] += 1
        name = f"{table}/part-{self._numbers[table]:06d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(to_table(table, self._rows[table], events), sink, **parquet_options(table))
        content = sink.getvalue().to_pybytes()
        write_whole(self._folder / name, content)
        offsets = [event.offset for event in events]
        digest = hashlib.sha256(content).hexdigest()
        self._new[table].append(Part(name, len(events), len(content), digest, min(offsets), max(offsets)))
        self._rows[table] += len(events)

    def take(self) -> Mapping[str, tuple[Part, ...]]:
        """The parts written since the last call, by table."""
        taken = {table: tuple(parts) for table, parts in self._new.items()}
        self._new = {table: [] for table in TABLES}
        return taken


def _highest_number(parts: Sequence[Part]) -> int:
    """The number of the newest part, 0 if there is none; `part-000003-000007.parquet` is of parts 3 to 7."""
    return max((int(Path(part.file).stem.rpartition("-")[2]) for part in parts), default=0)
