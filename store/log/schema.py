"""Parquet schema of the log: one table per kind of event, with the columns of its dataclass.

The first column of every table is `seq`, the order of writing within the table from 0, which the log adds. A field of
an event is a column of the same name; a column may be null only if its field may be `None`. The last tables hold counts
that compaction writes (store/log/rollups.py) instead of events.

The values that decided a judged token or an alternative (`uniform` and its levels) are stored to the last bit. Values
that decide nothing (`ROUNDED_FIELDS`, and the levels of other tokens) are rounded to 8 significant bits, within 0.2%,
and take a third of the space.

The schema is frozen: another one gets another `SCHEMA_VERSION`, and readers refuse it.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from types import NoneType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc

from store.errors import OmnidraftError
from store.events import (
    BlockDone,
    Drifted,
    Outcome,
    PromptCompleted,
    Recalled,
    TokenDecision,
    Updated,
    VersionPublished,
)
from store.log.rollups import COUNTS

SCHEMA_VERSION = 1

TABLES: Mapping[str, type] = {
    "decisions": TokenDecision,
    "blocks": BlockDone,
    "prompts": PromptCompleted,
    "updates": Updated,
    "drifts": Drifted,
    "recalls": Recalled,
    "versions": VersionPublished,
    **COUNTS,
}

# Values that decide nothing.
ROUNDED_FIELDS = frozenset(
    {
        "entropy",
        "head_estimate",
        "target_raw_probability",
        "emitted_raw_probability",
        "target_raw_entropy",
        "drafter_raw_probability",
        "drafter_raw_entropy",
    }
)

# Stored as float32: values that are computed in float32, and short durations. All other floats are float64.
FLOAT32_FIELDS = ROUNDED_FIELDS | frozenset(
    {
        "drafter_levels",
        "target_levels",
        "uniform",
        "chance",
        "expected_tokens",
        "expected_seconds",
        "seconds_decode",
        "seconds_translate",
        "seconds_verify",
        "seconds",
        "waited",
    }
)
LEVELS = ("drafter_levels", "target_levels")  # rounded for tokens about which they decided nothing
DECIDED = (Outcome.ACCEPTED.value, Outcome.REJECTED.value, Outcome.ALTERNATIVE.value)
# Columns with minimum and maximum per row group, so that readers can skip row groups.
SOUGHT_FIELDS = ("seq", "offset", "dataset", "target")
# Strings that hardly ever repeat gain nothing from a dictionary.
FREE_TEXT_FIELDS = frozenset({"prompt_id", "prompt_text", "completion_text", "folder", "digest"})
QUICK_LEVEL, SMALL_LEVEL = 3, 12  # of zstd: while a run writes, and when parts are joined
# Integers that grow slowly from row to row are delta-coded. Token ids do not grow: they use a dictionary.
RISING_FIELDS = frozenset({"seq", "offset", "block", "position"})

_SCALARS = {bool: pa.bool_(), int: pa.int32(), float: pa.float64(), bytes: pa.binary()}


class LoggedEvent(Protocol):
    """Protocol of an event that has a table. Every such event has a stream offset."""

    @property
    def offset(self) -> int:
        """Number of the prompt in the stream, from 0."""


def schema_of(table: str) -> pa.Schema:
    """Return the Arrow schema of `table`, with the table's name and the schema version in its metadata.

    Raises `OmnidraftError` for an unknown table, and `TypeError` for an event with a field that has no column type.
    """
    if table not in TABLES:
        raise OmnidraftError(f"a table must be one of {', '.join(TABLES)}, got {table!r}")
    hints = get_type_hints(TABLES[table])
    fields = [pa.field("seq", pa.int64(), nullable=False)]
    fields += [_field(name, annotation) for name, annotation in hints.items()]
    return pa.schema(fields, metadata={"omnidraft.table": table, "omnidraft.schema_version": str(SCHEMA_VERSION)})


def to_table(table: str, first_seq: int, events: Sequence[LoggedEvent]) -> pa.Table:
    """Convert events to rows, numbered from `first_seq`.

    Floats of a float32 column are rounded to float32; values that decide nothing are rounded further. Raises
    `pa.ArrowInvalid` for a value outside its column's range.
    """
    schema = schema_of(table)
    columns = [pa.arange(first_seq, first_seq + len(events))]
    for field in list(schema)[1:]:
        column = pa.array(list(map(attrgetter(field.name), events)), type=field.type)
        columns.append(_round_floats(column) if field.name in ROUNDED_FIELDS else column)
    rows = pa.Table.from_arrays(columns, schema=schema)
    return _round_levels(rows) if table == "decisions" else rows


def parquet_options(table: str, level: int = QUICK_LEVEL) -> dict[str, Any]:
    """Return keyword arguments of `pyarrow.parquet.write_table` that make this table small and fast to scan.

    Byte-split floats, delta-coded rising integers and dictionaries for the rest, with zstd level 3, take less than half
    the size of the defaults. Level 12 takes 5% less space and three times as long. Byte-split integers would save
    another 2%, but few readers support them. Arrow's copy of the schema and most statistics are left out: they take
    half a byte per row in a part of 5,000 rows.
    """
    dictionaries: list[str] = []
    encodings: dict[str, str] = {}
    for field in schema_of(table):
        column, value_type = _leaf(field)
        if pa.types.is_floating(value_type):
            encodings[column] = "BYTE_STREAM_SPLIT"
        elif field.name in RISING_FIELDS:
            encodings[column] = "DELTA_BINARY_PACKED"
        elif field.name not in FREE_TEXT_FIELDS and not pa.types.is_boolean(value_type):
            dictionaries.append(column)
    return {
        "compression": "zstd",
        "compression_level": level,
        "use_dictionary": dictionaries,
        "column_encoding": encodings,
        "store_schema": False,
        "write_statistics": [name for name in SOUGHT_FIELDS if name in schema_of(table).names],
    }


def _round_levels(decisions: pa.Table) -> pa.Table:
    outcomes = decisions["outcome"].combine_chunks()
    decided = pc.is_in(outcomes.dictionary, pa.array(DECIDED)).take(outcomes.indices)
    for name in LEVELS:
        levels = decisions[name].combine_chunks()
        values = levels.flatten()
        exact = decided.take(pc.list_parent_indices(levels))
        kept = pa.ListArray.from_arrays(
            levels.offsets, pc.if_else(exact, values, _round_floats(values)), type=levels.type
        )
        decisions = decisions.set_column(decisions.schema.get_field_index(name), decisions.schema.field(name), kept)
    return decisions


def _round_floats(values: pa.Array) -> pa.Array:
    """Round to the nearest float32 numbers whose lower 16 bits are zero."""
    bits = pc.add(values.view(pa.uint32()), pa.scalar(1 << 15, pa.uint32()))
    return pc.bit_wise_and(bits, pa.scalar(0xFFFF0000, pa.uint32())).view(pa.float32())


def _field(name: str, annotation: Any) -> pa.Field:
    inner = _strip_none(annotation)
    return pa.field(name, _column_type(name, inner), nullable=inner is not annotation)


def _strip_none(annotation: Any) -> Any:
    """Return `T` for `T | None`, and any other annotation unchanged."""
    choices = get_args(annotation)
    if NoneType not in choices:
        return annotation
    (inner,) = (choice for choice in choices if choice is not NoneType)
    return inner


def _column_type(name: str, annotation: Any) -> pa.DataType:
    if get_origin(annotation) is tuple:
        element = pa.field("element", _column_type(name, get_args(annotation)[0]), nullable=False)
        return pa.list_(element)
    if annotation is float and name in FLOAT32_FIELDS:
        return pa.float32()
    if annotation is str or issubclass(annotation, StrEnum):
        return pa.string() if name in FREE_TEXT_FIELDS else pa.dictionary(pa.int32(), pa.string())
    if annotation not in _SCALARS:
        raise TypeError(
            f"field {name!r} must have a type that a column can hold, got {annotation}; see store/log/schema.py"
        )
    return _SCALARS[annotation]


def _leaf(field: pa.Field) -> tuple[str, pa.DataType]:
    """Return Parquet's path of the column with the values of `field`, and their type."""
    if pa.types.is_list(field.type):
        return f"{field.name}.list.element", field.type.value_type
    return field.name, field.type
