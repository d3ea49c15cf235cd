"""The rows of a query can be exported as files."""

import csv
import io
from decimal import Decimal

import pyarrow as pa
import pytest

from store.errors import UsageError
from store.query.exports import export_rows

ROWS = pa.table(
    {
        "number": [1, -2, None],
        "text": ['a "b", c\nd', "=1+1", "-x"],
        "list": [[1, 2], [], None],
        "bytes": [b"\x00\xff", None, b"a"],
        "sum": [Decimal(3), Decimal("0.5"), None],
    }
)


def test_csv_is_read_back_unchanged_and_contains_no_formula():
    head, *rows = csv.reader(io.StringIO(export_rows(ROWS, "csv").decode()))
    assert head == ROWS.schema.names
    assert rows == [
        ["1", 'a "b", c\nd', "[1, 2]", "00ff", "3"],
        ["-2", "'=1+1", "[]", "", "0.5"],
        ["", "'-x", "", "61", ""],
    ]


def test_values_that_cannot_be_written_are_refused():
    with pytest.raises(UsageError, match="csv, json, parquet; got 'xlsx'"):
        export_rows(ROWS, "xlsx")
    with pytest.raises(UsageError, match="different names, got a, a"):
        export_rows(pa.table([[1], [2]], names=["a", "a"]), "parquet")
