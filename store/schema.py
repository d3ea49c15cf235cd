"""How the events look in Parquet: one table per kind of event, its columns read off the dataclass.

Every table starts with `seq`, the order of writing within the table from 0, which the log adds. A field of an
event is a column of the same name; a column may be null only where its field may be `None`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import pyarrow as pa

from store.errors import OmnidraftError
from store.events import BlockDone, Drifted, PromptCompleted, Recalled, TokenDecision, Updated, VersionPublished

SCHEMA_VERSION = 4

TABLES: Mapping[str, type] = MappingProxyType(
    {
        "decisions": TokenDecision,
        "blocks": BlockDone,
        "prompts": PromptCompleted,
        "updates": Updated,
        "drifts": Drifted,
        "recalls": Recalled,
        "versions": VersionPublished,
    }
)

# Float32 where the value is computed in float32 anyway, or is a short duration; the rest keeps double precision.
FLOAT32_FIELDS = frozenset(
    {
        "drafter_levels",
        "target_levels",
        "uniform",
        "head_estimate",
        "entropy",
        "seconds_decode",
        "seconds_translate",
        "seconds_verify",
        "seconds",
        "waited",
    }
)
# Strings that hardly ever repeat gain nothing from a dictionary.
FREE_TEXT_FIELDS = frozenset({"prompt_text", "completion_text", "folder", "digest"})
# Integers that grow slowly from row to row; token ids do not, so they are kept in a dictionary.
RISING_FIELDS = frozenset({"seq", "offset", "block", "position", "index"})

_SCALARS: Mapping[type, pa.DataType] = MappingProxyType(
    {bool: pa.bool_(), int: pa.int32(), float: pa.float64(), bytes: pa.binary()}
)


class LoggedEvent(Protocol):
    """An event that has a table. All of them carry the stream offset they belong to."""

    @property
    def offset(self) -> int:
        """Number of the prompt in the stream, from 0."""


def schema_of(table: str) -> pa.Schema:
    """Arrow schema of `table`, with the table's name and the schema version in its metadata.

    Raises `OmnidraftError` for a name that is no table, `TypeError` for an event whose field has no column type.
    """
    if table not in TABLES:
        raise OmnidraftError(f"a table must be one of {', '.join(TABLES)}, got {table!r}")
    hints = get_type_hints(TABLES[table])
    fields = [pa.field("seq", pa.int64(), nullable=False)]
    fields += [_field(name, annotation) for name, annotation in hints.items()]
    return pa.schema(fields, metadata={"omnidraft.table": table, "omnidraft.schema_version": str(SCHEMA_VERSION)})


def to_table(table: str, first_seq: int, events: Sequence[LoggedEvent]) -> pa.Table:
    """The rows of `events`, numbered from `first_seq`.

    Floats of a float32 column are rounded here. Raises `pa.ArrowInvalid` for a value outside its column's range.
    """
    schema = schema_of(table)
    columns = [pa.array(range(first_seq, first_seq + len(events)), type=pa.int64())]
    for field in list(schema)[1:]:
        columns.append(pa.array(list(map(attrgetter(field.name), events)), type=field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def parquet_options(table: str) -> dict[str, Any]:
    """Keyword arguments of `pyarrow.parquet.write_table` that make this table small and quick to scan.

    zstd level 3 with delta-coded rising integers, byte-split floats and dictionaries for the rest is half the size
    of the defaults; higher levels gain nothing.
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
        "compression_level": 3,
        "use_dictionary": dictionaries,
        "column_encoding": encodings,
    }


def _field(name: str, annotation: Any) -> pa.Field:
    inner = _without_none(annotation)
    return pa.field(name, _column_type(name, inner), nullable=inner is not annotation)


def _without_none(annotation: Any) -> Any:
    """`T` for `T | None`, anything else unchanged."""
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
            f"field {name!r} must have a type that a column can hold, got {annotation}; see store/schema.py"
        )
    return _SCALARS[annotation]


def _leaf(field: pa.Field) -> tuple[str, pa.DataType]:
    """Parquet's path of the column that holds the values of `field`, and their type."""
    if pa.types.is_list(field.type):
        return f"{field.name}.list.element", field.type.value_type
    return field.name, field.type
