"""Parquet schema of the log: one table per kind of event, with the columns of its dataclass.

The first column of every table is `seq`, the order of writing within the table from 0, which the log adds. A field of
an event is a column of the same name; a column may be null only if its field may be `None`.

The last three tables hold counts of decisions instead of events, so that common queries need not read every row.
Compaction writes them for its large parts (store/log/compaction.py); they have the part's name, in the folder of their
table. The decisions of other parts are counted by the query, with the same sums, in `store/query/sql/_counts_*.sql`.
Counts add up over rows. No key of them grows with the length of the stream alone, such as an offset would.

The values that decided a judged token or an alternative (`uniform` and its levels) are stored to the last bit. Values
that decide nothing (`ROUNDED_FIELDS`, and the levels of other tokens) are rounded to 8 significant bits, within 0.2%,
and take a third of the space.

The schema is frozen: another one gets another `SCHEMA_VERSION`, and readers refuse what they cannot read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter
from types import NoneType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc

from store.errors import OmnidraftError
from store.events import (
    BlockDone,
    DraftSource,
    Drifted,
    Outcome,
    PromptCompleted,
    Recalled,
    TokenDecision,
    Translation,
    Updated,
    VersionPublished,
)

SCHEMA_VERSION = 2
READABLE = (1, SCHEMA_VERSION)  # 1 lacks `noise` of prompts


@dataclass(frozen=True, slots=True)
class CountByVersion:
    """Number of decisions of a part with the same outcome and the same drafter updates in service."""

    offset: int  # the lowest
    last_offset: int  # the highest
    dataset: str
    target: str
    drafter: DraftSource
    drafter_version: int
    outcome: Outcome
    decisions: int


@dataclass(frozen=True, slots=True)
class CountByPlace:
    """Number of decisions of a part with the same outcome at the same index of their blocks."""

    offset: int  # the lowest
    dataset: str
    target: str
    drafter: DraftSource
    translation: Translation
    index: int
    pieces_count: int
    outcome: Outcome
    decisions: int
    drafter_level_sum: float | None  # over the first level of each decision; None if no decision has a level
    target_level_sum: float | None


@dataclass(frozen=True, slots=True)
class CountByToken:
    """Number of judged decisions of a part with the same proposed and the same emitted token."""

    offset: int  # the lowest
    target: str
    outcome: Outcome
    proposed_id: int | None  # None if the pieces led to a gap
    proposed_bytes: bytes | None
    emitted_id: int
    emitted_bytes: bytes | None
    decisions: int


COUNTS: Mapping[str, type] = {
    "counts_by_version": CountByVersion,
    "counts_by_place": CountByPlace,
    "counts_by_token": CountByToken,
}

# Aggregates of each group of decisions other than their number: by name, a column and a function.
MEASURES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "counts_by_version": {"offset": ("offset", "min"), "last_offset": ("offset", "max")},
    "counts_by_place": {
        "offset": ("offset", "min"),
        "drafter_level_sum": ("drafter_level", "sum"),
        "target_level_sum": ("target_level", "sum"),
    },
    "counts_by_token": {
        "offset": ("offset", "min"),
        "proposed_bytes": ("proposed_bytes", "first"),
        "emitted_bytes": ("emitted_bytes", "first"),
    },
}
# Keys: each combination of these columns has a row per part.
KEYS: Mapping[str, tuple[str, ...]] = {
    table: tuple(field.name for field in fields(kind) if field.name not in {"decisions", *MEASURES[table]})
    for table, kind in COUNTS.items()
}

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
LONG_FIELDS = frozenset({"noise"})  # integers of 64 bits
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
        """Number of the prompt in the stream."""


def schema_of(table: str) -> pa.Schema:
    """Return the Arrow schema of `table`, with the table's name and the schema version in its metadata.

    Raises `OmnidraftError` for an unknown table, and `TypeError` for an event with a field that has no column type.
    """
    if table not in TABLES:
        raise OmnidraftError(f"a table must be one of {', '.join(TABLES)}, got {table!r}")
    hints = get_type_hints(TABLES[table])
    fields = [pa.field("seq", pa.int64(), nullable=False)]
    for name, annotation in hints.items():
        inner = _strip_none(annotation)
        fields.append(pa.field(name, _column_type(name, inner), nullable=inner is not annotation))
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
    if name in LONG_FIELDS:
        return pa.int64()
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
