"""A run that an earlier state of the code left unfinished can be resumed, and ends with the expected rows.

`unfinished-run/` was killed between two blocks with sequences in flight, examples, n-grams and versions.
`finished-rows/` is the log with which the code of that time finished it. All names in its settings are relative to the
folder, so a copy works anywhere. The choice of kernels was measured when the run started and is in its checkpoint, so
another machine uses the same kernels. The last bits of a kernel's sums depend on the processor, and learning
propagates the difference: numbers with fractions are compared with a tolerance, and digests of learned weights are not
compared. Tokens, outcomes, counts and versions must be equal. A probability within a rounding error of its random draw
could differ on another processor; the run has none.
"""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from product import part_path, read_manifest
from pyarrow import parquet
from typing_commands import HERE, UNFINISHED

from store.log.schema import to_current_schema

ROWS = HERE / "finished-rows"
TABLES = ("decisions", "blocks", "prompts", "updates", "drifts", "recalls", "versions")
CLOCK = {"seconds", "waited", "started", "finished", "seconds_decode", "seconds_translate", "seconds_verify"}
LEARNED_BITS = {"digest"}
RELATIVE, ABSOLUTE = 0.01, 1e-3  # entropies and estimates agree within 0.2%


def rows_of(run: Path, table: str) -> pa.Table:
    """All rows of a table, without times and digests."""
    parts = [
        to_current_schema(table, parquet.read_table(part_path(run, part))) for part in read_manifest(run).tables[table]
    ]
    rows = pa.concat_tables(parts)
    return rows.select([name for name in rows.column_names if name not in CLOCK | LEARNED_BITS])


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, numbers with fractions up to a tolerance."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(one == other)


@pytest.mark.parametrize("table", TABLES)
def test_a_resumed_run_ends_with_the_same_rows(table: str, resumed: tuple[Path, Path], rewriting: bool) -> None:
    run, _ = resumed
    assert read_manifest(run).finished
    found, path = rows_of(run, table), ROWS / f"{table}.parquet"
    if rewriting:
        ROWS.mkdir(exist_ok=True)
        parquet.write_table(found, path, compression="zstd")
    golden = parquet.read_table(path)
    assert set(golden.column_names) <= set(found.column_names), "columns may be added"
    found = found.select(golden.column_names)
    for number, (one, other) in enumerate(zip(found.to_pylist(), golden.to_pylist(), strict=False)):
        different = [f"  {key}: {other[key]!r}, now {one[key]!r}" for key in one if not same(one[key], other[key])]
        assert not different, "\n".join([f"row {number} of {table} (offset {other['offset']}) was:", *different])
    assert len(found) == len(golden)


def test_the_stored_run_is_unfinished() -> None:
    manifest = read_manifest(UNFINISHED / "run")
    assert manifest.checkpoint
    assert not manifest.finished
    for table in TABLES:
        stored, whole = sum(part.rows for part in manifest.tables[table]), parquet.read_table(ROWS / f"{table}.parquet")
        assert stored < len(whole) or table in ("recalls", "drifts", "versions")
    assert manifest.tables["updates"]
    assert manifest.tables["versions"]
