"""Rows of files: Parquet, JSON lines, CSV and TSV. All are streamed; a bad row is told and passed over."""

import csv
import json
from collections.abc import Collection, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pipeline.source_rows import SURROGATE, Fault, Row, Rows
from store.errors import SourceError

if TYPE_CHECKING:
    import pyarrow

MAX_LINE_BYTES = 10_000_000
ROWS_LOOKED_AT = 1000  # of JSON lines, to learn the columns
ROWS_PER_BATCH = 256
SAMPLE_BYTES = 1_000_000
TOO_LONG = Fault(f"the line must not be longer than {MAX_LINE_BYTES:,} bytes")


class ParquetRows:
    """Rows of a Parquet file; the line is the row's number."""

    def __init__(self, path: Path):
        from pyarrow import ArrowException, parquet

        try:
            self._file = parquet.ParquetFile(path)
        except (ArrowException, OSError) as error:
            raise SourceError(
                f"'{path}' must be a Parquet file, but cannot be read as one: {_one_line(error)}"
            ) from None
        self._path = path
        self.columns: Collection[str] = self._file.schema_arrow.names

    def count(self) -> int:
        """The exact number of rows."""
        return self._file.metadata.num_rows

    def read(self, columns: Collection[str]) -> Iterator[Row]:
        """As `Rows.read`; other columns are not even decompressed."""
        from pyarrow import ArrowException

        present = [name for name in self.columns if name in columns]
        line = 0
        try:
            for batch in self._file.iter_batches(ROWS_PER_BATCH, columns=present, use_threads=False):
                for values in parquet_values(batch):
                    line += 1
                    yield Row(line, values)
        except (ArrowException, OSError) as error:
            raise SourceError(
                f"'{self._path}' is damaged after row {line}: {_one_line(error)}. Get the file again."
            ) from None
        finally:
            self._file.close()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def parquet_values(batch: "pyarrow.RecordBatch") -> Iterator[dict[str, object] | Fault]:
    """The rows of a batch; a fault for one whose text is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first row is out; now row by row, to lose only the bad ones
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield Fault(f"the row must be valid UTF-8: {error.reason} at byte {error.start} of a column")


class JsonLinesRows:
    """Rows of a file with one JSON object per line."""

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as file:
            self.columns = json_columns(file)

    def count(self) -> int:
        """An estimate from the length of the first lines."""
        return _estimated_lines(self._path)

    def read(self, columns: Collection[str]) -> Iterator[Row]:
        """As `Rows.read`."""
        with self._path.open("rb") as file:
            yield from json_rows(file)


class StandardInputRows:
    """JSON lines of a stream that cannot be rewound; each row is out as soon as its line is whole."""

    columns = None

    def __init__(self, stream: BinaryIO):
        self._stream = stream

    def count(self) -> None:
        """Unknown: the stream may never end."""

    def read(self, columns: Collection[str]) -> Iterator[Row]:
        """As `Rows.read`."""
        return json_rows(self._stream)


class DelimitedRows:
    """Rows of a CSV or TSV file with a header, quoted as in RFC 4180; the line is where the row begins."""

    def __init__(self, path: Path, delimiter: str):
        self._path = path
        self._delimiter = delimiter
        # The limit is the csv module's, for the whole process: only ever raised. It bounds what a quote
        # that nobody closes can swallow.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        with path.open("rb") as file:
            self.columns: Collection[str] = self._header(file)

    def count(self) -> int:
        """An estimate from the length of the first lines."""
        return max(_estimated_lines(self._path) - 1, 0)

    def read(self, columns: Collection[str]) -> Iterator[Row]:
        """As `Rows.read`."""
        with self._path.open("rb") as file:
            reader = csv.reader(_decoded(file), delimiter=self._delimiter, strict=True)
            next(reader, None)
            while True:
                line = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield Row(line, Fault(f"the row must be well-formed CSV: {error}"))
                else:
                    if fields:  # a blank line has none
                        yield Row(line, self._values(fields))

    def _header(self, file: BinaryIO) -> list[str]:
        try:
            header = next(csv.reader(_decoded(file), delimiter=self._delimiter, strict=True), [])
        except csv.Error as error:
            raise SourceError(f"'{self._path}' must begin with a header of column names: {error}.") from None
        fault = _text_fault(header)
        if fault or not header or len(set(header)) < len(header):
            got = fault.reason if fault else f"got {header!r}"
            raise SourceError(f"'{self._path}' must begin with a header of different column names, {got}.")
        return header

    def _values(self, fields: list[str]) -> dict[str, object] | Fault:
        fault = _text_fault(fields)
        if fault:
            return fault
        if len(fields) != len(self.columns):
            return Fault(f"the row must have {len(self.columns)} fields, as the header, got {len(fields)}")
        return dict(zip(self.columns, fields, strict=True))


def open_file(path: Path) -> Rows:
    """Open a file by its suffix.

    Raises:
        SourceError: the suffix is unknown, or the file cannot be read.
    """
    try:
        match path.suffix.lower():
            case ".parquet":
                return ParquetRows(path)
            case ".jsonl" | ".ndjson":
                return JsonLinesRows(path)
            case ".csv":
                return DelimitedRows(path, ",")
            case ".tsv":
                return DelimitedRows(path, "\t")
    except OSError as error:
        raise SourceError(f"'{path}' must be a readable file: {error.strerror}.") from None
    raise SourceError(f"'{path}' must end in {', '.join(SUFFIXES)}. For JSON lines from elsewhere, pipe them to '-'.")


SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv", ".tsv")


def json_rows(file: BinaryIO) -> Iterator[Row]:
    """One row per line that is not blank."""
    for line, content in enumerate(_bounded_lines(file), start=1):
        if content is None:
            yield Row(line, TOO_LONG)
        elif content.strip():
            yield Row(line, json_object(content, "utf-8-sig" if line == 1 else "utf-8"))


def json_columns(file: BinaryIO) -> Collection[str] | None:
    """The names in the first JSON lines; None where none of them is an object."""
    rows = [row.values for row in islice(json_rows(file), ROWS_LOOKED_AT)]
    objects = [values for values in rows if not isinstance(values, Fault)]
    return tuple(dict.fromkeys(chain(*objects))) if objects else None


def json_object(content: bytes, encoding: str) -> dict[str, object] | Fault:
    """The object that a line holds, or why it holds none."""
    try:
        values = json.loads(content.decode(encoding))
    except UnicodeDecodeError as error:
        return Fault(f"the line must be valid UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Fault(f"the line must be JSON: {error}")
    if not isinstance(values, dict):
        return Fault(f"the line must be a JSON object, got a JSON {_JSON_KINDS[type(values)]}")
    return values


_JSON_KINDS = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def _bounded_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines with their ends; None for one that is too long, which is never held whole."""
    while content := file.readline(MAX_LINE_BYTES + 1):
        if len(content) <= MAX_LINE_BYTES or content.endswith(b"\n"):
            yield content
        else:
            while content and not content.endswith(b"\n"):
                content = file.readline(MAX_LINE_BYTES)
            yield None


# A row may span lines, so what is wrong with a line must survive the CSV reader inside the text: bytes
# that are not UTF-8 as the surrogates U+DC80-DCFF, a line too long as a surrogate that those never use.
_TOO_LONG_MARK = "\udfff"


def _decoded(file: BinaryIO) -> Iterator[str]:
    for number, content in enumerate(_bounded_lines(file)):
        text = _TOO_LONG_MARK + "\n" if content is None else content.decode("utf-8", "surrogateescape")
        yield text.removeprefix("\ufeff") if number == 0 else text


def _text_fault(fields: list[str]) -> Fault | None:
    if any(_TOO_LONG_MARK in field for field in fields):
        return TOO_LONG
    if any(SURROGATE.search(field) for field in fields):
        return Fault("the row must be valid UTF-8")
    return None


def _estimated_lines(path: Path) -> int:
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    lines = sample.count(b"\n") + (not sample.endswith(b"\n") and len(sample) < SAMPLE_BYTES)
    return round(lines * path.stat().st_size / max(len(sample), 1))
