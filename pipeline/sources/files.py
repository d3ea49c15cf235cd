"""Rows of files: Parquet, JSON lines, CSV and TSV. All are streamed; a bad row is reported and skipped."""

import csv
import json
from collections.abc import Collection, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from typing_extensions import override

from pipeline.sources.rows import SURROGATE, Fault, Rows, SourceRow
from store.errors import SourceError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

MAX_LINE_BYTES = 10_000_000
ROWS_INSPECTED = 1000  # JSON lines that are read to learn the columns
ROWS_PER_BATCH = 256
SAMPLE_BYTES = 1_000_000
TOO_LONG = Fault(f"the line must not be longer than {MAX_LINE_BYTES:,} bytes")


class ParquetRows(Rows):
    """Rows of a Parquet file; the line is the row's number."""

    def __init__(self, path: Path) -> None:
        from pyarrow import ArrowException, parquet

        try:
            self._file = parquet.ParquetFile(path)
        except (ArrowException, OSError) as error:
            raise SourceError(
                f"'{path}' must be a Parquet file, but cannot be read as one: {_join_lines(error)}"
            ) from None
        self._path = path
        self.columns: Collection[str] = self._file.schema_arrow.names

    @override
    def count(self) -> int:
        return int(self._file.metadata.num_rows)

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        """Yield all rows. Columns that are not wanted are not decompressed."""
        from pyarrow import ArrowException

        line = 0
        try:
            for line, values in enumerate(read_parquet(self._file, columns), start=1):
                yield SourceRow(line, values)
        except (ArrowException, OSError) as error:
            raise SourceError(
                f"'{self._path}' is damaged after row {line}: {_join_lines(error)}. Get the file again."
            ) from None
        finally:
            self._file.close()


def _join_lines(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def read_parquet(file: "ParquetFile", columns: Collection[str]) -> Iterator[dict[str, object] | Fault]:
    """Yield the rows of a file, with those of the columns that it has; a `Fault` for a row whose text is not UTF-8."""
    present = [name for name in file.schema_arrow.names if name in columns]
    for batch in file.iter_batches(ROWS_PER_BATCH, columns=present, use_threads=False):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:  # raised before the first row; row by row, only the bad ones are lost
            for number in range(batch.num_rows):
                try:
                    yield batch.slice(number, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield Fault(f"the row must be valid UTF-8: {error.reason} at byte {error.start} of a column")


class JsonLinesRows(Rows):
    """Rows of a file that holds one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self.columns = json_columns(file)

    @override
    def count(self) -> int:
        """Estimate the number of rows from the length of the first lines."""
        return _estimate_lines(self._path)

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        with self._path.open("rb") as file:
            yield from json_rows(file)


class StandardInputRows(Rows):
    """JSON lines of a stream that cannot be rewound; each row is yielded as soon as its line is complete."""

    columns = None

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    @override
    def count(self) -> None:
        """Return None: the stream may never end."""

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        return json_rows(self._stream)


class DelimitedRows(Rows):
    """Rows of a CSV or TSV file with a header, quoted as in RFC 4180; the line is where the row begins."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self._path = path
        self._delimiter = delimiter
        # The limit belongs to the csv module and holds for the whole process: it is only ever raised. It
        # bounds how much text an unclosed quote can consume.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        with path.open("rb") as file:
            self.columns: Collection[str] = self._read_header(file)

    @override
    def count(self) -> int:
        """Estimate the number of rows from the length of the first lines."""
        return max(_estimate_lines(self._path) - 1, 0)

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        with self._path.open("rb") as file:
            reader = csv.reader(_decode_lines(file), delimiter=self._delimiter, strict=True)
            next(reader, None)
            while True:
                line = reader.line_num + 1
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield SourceRow(line, Fault(f"the row must be well-formed CSV: {error}"))
                else:
                    if fields:  # a blank line has none
                        yield SourceRow(line, self._check_fields(fields))

    def _read_header(self, file: BinaryIO) -> list[str]:
        try:
            header = next(csv.reader(_decode_lines(file), delimiter=self._delimiter, strict=True), [])
        except csv.Error as error:
            raise SourceError(f"'{self._path}' must begin with a header of column names: {error}.") from None
        fault = _find_text_fault(header)
        if fault or not header or len(set(header)) < len(header):
            got = fault.reason if fault else f"got {header!r}"
            raise SourceError(f"'{self._path}' must begin with a header of different column names, {got}.")
        return header

    def _check_fields(self, fields: list[str]) -> dict[str, object] | Fault:
        fault = _find_text_fault(fields)
        if fault:
            return fault
        if len(fields) != len(self.columns):
            return Fault(f"the row must have {len(self.columns)} fields, as the header, got {len(fields)}")
        return dict(zip(self.columns, fields, strict=True))


def open_file(path: Path) -> Rows:
    """Open a file by its suffix."""
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


def json_rows(file: BinaryIO) -> Iterator[SourceRow]:
    """Yield one row per line that is not blank."""
    for line, content in enumerate(_read_bounded_lines(file), start=1):
        if content is None:
            yield SourceRow(line, TOO_LONG)
        elif content.strip():
            yield SourceRow(line, json_object(content, "utf-8-sig" if line == 1 else "utf-8"))


def json_columns(file: BinaryIO) -> Collection[str] | None:
    """Return the names in the first JSON lines; None if none of them is an object."""
    rows = [row.values for row in islice(json_rows(file), ROWS_INSPECTED)]
    objects = [values for values in rows if not isinstance(values, Fault)]
    return tuple(dict.fromkeys(chain(*objects))) if objects else None


def json_object(content: bytes, encoding: str) -> dict[str, object] | Fault:
    """Parse the JSON object of a line; a `Fault` if the line holds none."""
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


def _read_bounded_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield lines with their ends; None for a line that is too long, which is never held in memory as a whole."""
    while content := file.readline(MAX_LINE_BYTES + 1):
        if len(content) <= MAX_LINE_BYTES or content.endswith(b"\n"):
            yield content
        else:
            while content and not content.endswith(b"\n"):
                content = file.readline(MAX_LINE_BYTES)
            yield None


# A row may span lines, so the fault of a line must survive the CSV reader inside the text: bytes
# that are not UTF-8 as the surrogates U+DC80-DCFF, a line too long as another surrogate.
_TOO_LONG_MARK = "\udfff"


def _decode_lines(file: BinaryIO) -> Iterator[str]:
    for number, content in enumerate(_read_bounded_lines(file)):
        text = _TOO_LONG_MARK + "\n" if content is None else content.decode("utf-8", "surrogateescape")
        yield text.removeprefix("\ufeff") if number == 0 else text


def _find_text_fault(fields: list[str]) -> Fault | None:
    if any(_TOO_LONG_MARK in field for field in fields):
        return TOO_LONG
    if any(SURROGATE.search(field) for field in fields):
        return Fault("the row must be valid UTF-8")
    return None


def _estimate_lines(path: Path) -> int:
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    lines = sample.count(b"\n") + (not sample.endswith(b"\n") and len(sample) < SAMPLE_BYTES)
    return round(lines * path.stat().st_size / max(len(sample), 1))
