"""What a log takes on disk, and its decisions as events again: what a measurement of the log begins with."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from store.events import Drafter, Origin, Outcome, TokenDecision, Translation
from store.manifest import part_path
from store.partitions import named_parts

REST = "(file)"  # what belongs to no column: the footer with names, places and statistics
_ENUMS = {"translation": Translation, "outcome": Outcome, "origin": Origin, "drafter": Drafter}
_LISTS = ("pieces", "drafter_levels", "target_levels")


def bytes_by_column(run_folder: Path, table: str = "decisions") -> dict[str, float]:
    """Bytes on disk per row of a table, by column, the largest first; they add up to all that its parts take.

    Empty where the table has no rows. Raises what `read_manifest` raises.
    """
    parts = named_parts(run_folder, table)
    sizes: Counter[str] = Counter()
    for folder, part in parts:
        columns = _column_bytes(part_path(folder, part))
        sizes.update(columns)
        sizes[REST] += part.bytes - columns.total()
    rows = sum(part.rows for _, part in parts)
    return {name: size / rows for name, size in sizes.most_common()}


def logged_decisions(run_folder: Path, most: int) -> list[TokenDecision]:
    """The first `most` decisions of a log, as they were appended to it. Raises what `read_manifest` raises."""
    events: list[TokenDecision] = []
    for folder, part in named_parts(run_folder, "decisions"):
        if len(events) >= most:
            break
        rows = pq.read_table(part_path(folder, part), partitioning=None).drop_columns("seq")
        events += _decisions(rows.slice(0, most - len(events)))
    return events


def _column_bytes(path: Path) -> Counter[str]:
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    sizes: Counter[str] = Counter()
    for group in groups:
        for number in range(group.num_columns):
            column = group.column(number)
            sizes[column.path_in_schema.partition(".")[0]] += column.total_compressed_size
    return sizes


def _decisions(rows: pa.Table) -> list[TokenDecision]:
    columns = {name: rows[name].to_pylist() for name in rows.schema.names}
    for name, kind in _ENUMS.items():
        columns[name] = [None if value is None else kind(value) for value in columns[name]]
    for name in _LISTS:
        columns[name] = list(map(tuple, columns[name]))
    return [TokenDecision(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
