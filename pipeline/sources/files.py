"""Rows of files: Parquet, Arrow, JSON, CSV and TSV, each by itself or many as one source.

All are streamed but a JSON array; a bad row is reported and skipped. JSON, CSV and TSV may be compressed.
"""

import csv
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from typing_extensions import override

from pipeline.sources.rows import SURROGATE, Fault, Rows, SourceRow, require_different
from store.errors import SourceError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

MAX_LINE_BYTES = 10_000_000
ROWS_INSPECTED = 1000  # JSON lines that are read to learn the columns
ROWS_PER_BATCH = 256
SAMPLE_BYTES = 1_000_000
ARRAY_BYTES = 1 << 30  # most of a JSON array, which is read as a whole
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
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
        self.columns: Collection[str] = require_different(self._file.schema_arrow.names, f"'{path}'")

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
        yield from _list_rows(batch)


def _list_rows(batch: Any) -> Iterator[dict[str, object] | Fault]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first row; row by row, only the bad ones are lost
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield Fault(f"the row must be valid UTF-8: {error.reason} at byte {error.start} of a column")


class ArrowRows(Rows):
    """Rows of an Arrow file or stream, as data sets are saved; the file is mapped."""

    def __init__(self, path: Path) -> None:
        from pyarrow import ArrowInvalid, ipc, memory_map

        self._path = path
        file = memory_map(str(path))
        try:
            try:
                found = ipc.open_file(file)
                self._batches: Iterator[Any] = (found.get_batch(number) for number in range(found.num_record_batches))
            except ArrowInvalid:
                file.seek(0)
                self._batches = found = ipc.open_stream(file)
        except ArrowInvalid as error:
            raise SourceError(f"'{path}' must be an Arrow file, but is none: {_join_lines(error)}.") from None
        self.columns: Collection[str] = require_different(found.schema.names, f"'{path}'")

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        from pyarrow import ArrowException

        wanted, line = [name for name in self.columns if name in columns], 0
        try:
            for batch in self._batches:
                parts = range(0, batch.num_rows, ROWS_PER_BATCH)
                rows = (_list_rows(batch.select(wanted).slice(begin, ROWS_PER_BATCH)) for begin in parts)
                for values in chain.from_iterable(rows):
                    line += 1
                    yield SourceRow(line, values)
        except (ArrowException, OSError) as error:
            raise SourceError(
                f"'{self._path}' is damaged after row {line}: {_join_lines(error)}. Get the file again."
            ) from None


class JsonLinesRows(Rows):
    """Rows of a file that holds one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with open_bytes(path) as file:
            self.columns = json_columns(file)

    @override
    def count(self) -> int | None:
        """Estimate the number of rows from the length of the first lines."""
        return _estimate_lines(self._path)

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        with open_bytes(self._path) as file:
            yield from json_rows(file)


class JsonArrayRows(Rows):
    """Rows of a file that holds one JSON value: an array of objects, or an object with such an array or of columns. The
    line is the object's number.
    """

    def __init__(self, path: Path) -> None:
        with open_bytes(path) as file:
            content = file.read(ARRAY_BYTES)  # what is beyond it is missing, so it is no JSON
        try:
            values = _list_objects(json.loads(content.decode("utf-8-sig")))
        except (ValueError, RecursionError) as error:
            way_out = f"write one object a line: jq -c '.[]' {path} > {path.stem}.jsonl"
            raise SourceError(f"'{path}' must be a JSON array, but cannot be read as one: {error}; {way_out}") from None
        self._rows = [_check_object(value, "element") for value in values]
        self.columns = _join_columns(self._rows)

    @override
    def count(self) -> int:
        return len(self._rows)

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        return (SourceRow(line, values) for line, values in enumerate(self._rows, start=1))


def _list_objects(value: Any) -> list[Any]:
    """Return the rows of a JSON value: a list, the list `data` of an object, or a table as pandas writes it, by column,
    by row, or with the names of the columns beside the rows. Another object is one row.
    """
    match value:
        case {"columns": [*names], "data": [*rows]}:
            return [dict(zip(names, row, strict=True)) for row in rows]
        case list() | {"data": list()}:
            return value["data"] if isinstance(value, dict) else value
        case dict() if value and all(isinstance(one, dict) for one in value.values()):
            if all(map(str.isdigit, value)):
                return list(value.values())
            if all(map(str.isdigit, chain(*value.values()))):
                return [
                    dict(zip(value, row, strict=True))
                    for row in zip(*(one.values() for one in value.values()), strict=True)
                ]
    return [value]


class ManyRows(Rows):
    """Rows of files one after another; the line is the row's number in all of them. Columns are those of the first."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._first = paths, open_file(paths[0])
        self.columns = self._first.columns

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        line = 0
        for path in self._paths:
            rows = self._first if path is self._paths[0] else open_file(path)
            for row in rows.read(columns):
                line, values = line + 1, row.values
                values = Fault(f"{path}:{row.line}: {values.reason}") if isinstance(values, Fault) else values
                yield SourceRow(line, values)


class StandardInputRows(Rows):
    """JSON lines of a stream that cannot be rewound; each row is yielded as soon as its line is complete."""

    columns = None

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

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
        with open_bytes(path) as file:
            header = self._read_header(file)
        if len(header) == 1 and ";" in header[0]:  # as programs write CSV where a comma is the decimal sign
            self._delimiter = ";"
            with open_bytes(path) as file:
                header = self._read_header(file)
        self.columns: Collection[str] = header

    @override
    def count(self) -> int | None:
        """Estimate the number of rows from the length of the first lines."""
        lines = _estimate_lines(self._path)
        return None if lines is None else max(lines - 1, 0)

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        with open_bytes(self._path) as file:
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
        if fields == self.columns:
            return Fault("the row must not repeat the header, as those of joined files do")
        return dict(zip(self.columns, fields, strict=True))


SUFFIXES = (".parquet", ".arrow", ".feather", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TEXT_SUFFIXES = SUFFIXES[3:]  # of files that may be compressed


def kind_of(path: Path) -> str | None:
    """Return the suffix that says how a file is read; None if it is not.

    >>> kind_of(Path("a.jsonl.gz")), kind_of(Path("a.parquet.gz"))
    ('.jsonl', None)
    """
    packed, suffix = path.suffix.lower() in COMPRESSIONS, path.suffix.lower()
    suffix = Path(path.stem).suffix.lower() if packed else suffix
    return suffix if suffix in (TEXT_SUFFIXES if packed else SUFFIXES) else None


def open_file(path: Path) -> Rows:
    """Open a file by its suffix."""
    try:
        match kind_of(path):
            case ".parquet":
                return ParquetRows(path)
            case ".arrow" | ".feather":
                return ArrowRows(path)
            case ".json" if _holds_one_value(path):
                return JsonArrayRows(path)
            case ".jsonl" | ".ndjson" | ".json":
                return JsonLinesRows(path)
            case ".csv":
                return DelimitedRows(path, ",")
            case ".tsv":
                return DelimitedRows(path, "\t")
    except OSError as error:
        raise SourceError(f"'{path}' must be a readable file: {error.strerror or _join_lines(error)}.") from None
    raise SourceError(
        f"'{path}' must end in {', '.join(SUFFIXES)}, text also with {' or '.join(COMPRESSIONS)}. For JSON lines from "
        "elsewhere, pipe them to '-'."
    )


def list_files(folder: Path) -> list[Path]:
    """Return the files below a folder that can be read, by path. Left out are hidden ones, what the library `datasets`
    has computed from a saved data set, and JSON beside other data, which describes it. Raises `SourceError` if they are
    of several kinds, or there is none.
    """
    below = sorted(path for path in folder.rglob("*") if kind_of(path) and path.is_file())
    seen = [path for path in below if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    seen = [path for path in seen if not (path.match("cache-*.arrow") and path.with_name("state.json").exists())]
    data = [path for path in seen if kind_of(path) != ".json"] or seen
    kinds = sorted({str(kind_of(path)) for path in data})
    if len(kinds) == 1:
        return data
    got = f"files of {' and '.join(kinds)}; name some in quotes, as '{folder}/*{kinds[0]}'" if kinds else "none"
    raise SourceError(f"The folder '{folder}' must hold files of one kind ({', '.join(SUFFIXES)}), got {got}.")


def name_dataset(path: Path) -> str:
    """Return a file's name without the suffixes that say how it is read."""
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSIONS else path.stem


def open_bytes(path: Path) -> BinaryIO:
    """Open a file; one that ends in .gz or .zst is decompressed while it is read."""
    kind = COMPRESSIONS.get(path.suffix.lower())
    if kind is None:
        return path.open("rb")
    from pyarrow import CompressedInputStream, OSFile

    return io.BufferedReader(CompressedInputStream(OSFile(str(path)), kind))


def _holds_one_value(path: Path) -> bool:
    """Return whether a JSON file is an array or one object; many that are named so hold one object a line."""
    with open_bytes(path) as file:
        first, second = (next(lines := _read_bounded_lines(file), b""), next(lines, b""))
    begin = (first or b"[").removeprefix(b"\xef\xbb\xbf").strip()
    return begin.startswith(b"[") or begin in (b"", b"{") or second == b""


def json_rows(file: BinaryIO) -> Iterator[SourceRow]:
    """Yield one row per line that is not blank."""
    for line, content in enumerate(_read_bounded_lines(file), start=1):
        if content is None:
            yield SourceRow(line, TOO_LONG)
        elif content.strip():
            yield SourceRow(line, json_object(content))


def json_columns(file: BinaryIO) -> Collection[str] | None:
    """Return the names in the first JSON lines; None if none of them is an object."""
    return _join_columns(row.values for row in islice(json_rows(file), ROWS_INSPECTED))


def _join_columns(rows: Iterable[Mapping[str, object] | Fault]) -> Collection[str] | None:
    objects = [values for values in rows if not isinstance(values, Fault)]
    return tuple(dict.fromkeys(chain(*objects))) if objects else None


def json_object(content: bytes, encoding: str = "utf-8-sig") -> dict[str, object] | Fault:
    """Parse the JSON object of a line, which may begin with a byte-order mark, as files do that were joined; a `Fault`
    if the line holds none.
    """
    try:
        values = json.loads(content.decode(encoding))
    except UnicodeDecodeError as error:
        return Fault(f"the line must be valid UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Fault(f"the line must be JSON: {error}")
    return _check_object(values, "line")


def _check_object(values: object, what: str) -> dict[str, object] | Fault:
    if not isinstance(values, dict):
        return Fault(f"the {what} must be a JSON object, got a JSON {_JSON_KINDS[type(values)]}")
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
    for content in _read_bounded_lines(file):
        text = _TOO_LONG_MARK + "\n" if content is None else content.decode("utf-8", "surrogateescape")
        yield text.removeprefix("\ufeff")  # at the beginning of each of the files that were joined


def _find_text_fault(fields: list[str]) -> Fault | None:
    if any(_TOO_LONG_MARK in field for field in fields):
        return TOO_LONG
    if any(SURROGATE.search(field) for field in fields):
        return Fault("the row must be valid UTF-8")
    return None


def _estimate_lines(path: Path) -> int | None:
    """Return the number of lines by the length of the first ones; None for a compressed file."""
    if path.suffix.lower() in COMPRESSIONS:
        return None
    with path.open("rb") as file:
        sample = file.read(SAMPLE_BYTES)
    lines = sample.count(b"\n") + (not sample.endswith(b"\n") and len(sample) < SAMPLE_BYTES)
    return round(lines * path.stat().st_size / max(len(sample), 1))
