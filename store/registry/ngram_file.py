"""The n-gram cache on disk: one Parquet file with the digest of its pair of vocabularies."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from store.errors import CorruptError, VocabularyError

SavedNgram = tuple[tuple[int, ...], int, int]  # drafter pieces, target token, number of uses
_SCHEMA = pa.schema([("pieces", pa.list_(pa.int32())), ("token", pa.int32()), ("count", pa.int64())])
_PAIR = b"omnidraft.pair"


def write_ngrams(path: Path, ngrams: Iterable[SavedNgram], pair: str) -> None:
    """Write entries in the given order. `pair` is the digest of the two vocabularies."""
    columns = list(zip(*ngrams, strict=True)) or [(), (), ()]
    table = pa.table([pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], _SCHEMA)
    parquet.write_table(table.replace_schema_metadata({_PAIR: pair.encode()}), path, compression="zstd")


def read_ngrams(path: Path, pair: str | None) -> list[SavedNgram]:
    """Read entries in the order in which they were saved. Raises VocabularyError if they were made for another pair of
    vocabularies, unless `pair` is None, and CorruptError for another file.
    """
    try:
        table = parquet.read_table(path)
        found = (table.schema.metadata or {}).get(_PAIR, b"").decode()
        table = table.select(_SCHEMA.names).cast(_SCHEMA)
        rows = [(tuple(row["pieces"]), row["token"], row["count"]) for row in table.to_pylist()]
    except (pa.ArrowException, KeyError, OSError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{path} must be a saved n-gram cache, but it cannot be read: {error}; "
            "delete it to start with an empty cache"
        ) from error
    if pair not in (None, found):
        raise VocabularyError(
            f"{path} must have been made for this pair of vocabularies ({pair[:12]}), but was for "
            f"{found[:12] or 'none'}; start with an empty cache, or use the target and drafter that it belongs to"
        )
    return rows
