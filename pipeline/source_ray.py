"""Rows that Ray Data streams: datasets of many files, on disks or in object stores, larger than memory."""

import io
import logging
import os
import pickle
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from pipeline.source_files import ROWS_PER_BATCH, json_columns, json_rows, parquet_values
from pipeline.source_rows import Fault, Row
from store.errors import SourceError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

SPEC, ADDRESS = "ray:", "RAY_ADDRESS"
SUFFIXES = (".parquet", ".jsonl", ".ndjson")
BLOCK_BYTES = 16_000_000  # of the blocks that Ray reads ahead; its object store holds a bounded number of them
TASKS = 1000  # at most so many share the files; each costs Ray some milliseconds

Values = Mapping[str, object] | Fault


class RayRows:
    """Rows of Parquet or JSON lines files, read by Ray's workers in the order of the files' names.

    Ray reads ahead as far as its object store has room, and waits then. The line is the row's number in all files
    put together, blank lines not counted. Ray is needed when the rows are read: the cluster that the process has
    joined, or else the one that RAY_ADDRESS names, or else one that is started for this process. Its workers must be
    able to import this package and to read the files at the same path.

    Args:
        spec: `ray:` and a file, a folder, or files of a folder as `FOLDER/*.parquet`; a path of this machine,
            or a URI that pyarrow knows, such as `s3://bucket/prompts?region=eu-central-1`.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        _ray(spec)
        with self._reachable():
            self._files, self._paths = _found(spec.removeprefix(SPEC))
        suffixes = {PurePosixPath(path).suffix.lower() for path in self._paths}
        if len(suffixes) != 1:
            got = f"files of {', '.join(sorted(suffixes))}" if suffixes else "no such file"
            raise SourceError(
                f"The source '{spec}' must be files of one kind, {' or '.join(SUFFIXES)}, got {got}. "
                f"Name them as '{SPEC}FOLDER/*.parquet'."
            )
        self.dataset = _name(spec)
        with self._reachable():
            self.columns = self._columns()

    def count(self) -> None:
        """Unknown: the files would have to be opened one by one."""

    def read(self, columns: Collection[str]) -> Iterator[Row]:
        """As `Rows.read`."""
        with self._reachable():
            paths = [{"path": path} for path in self._paths]
            data = _started(_ray(self._spec)).data
            files = data.from_items(paths, override_num_blocks=min(len(paths), TASKS))
            rows = files.flat_map(partial(_rows, self._files, frozenset(columns)))
            for line, values in enumerate(_streamed(rows), start=1):
                yield Row(line, values)

    def _columns(self) -> Collection[str] | None:
        """Of the first file."""
        from pyarrow import parquet

        path = self._paths[0]
        if _is_parquet(path):
            with self._files.open_input_file(path) as file:
                names: list[str] = parquet.read_schema(file).names
                return names
        with self._files.open_input_stream(path) as file:
            return json_columns(io.BufferedReader(file))

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except SourceError:
            raise
        except Exception as error:  # whatever Ray, Arrow and the storage behind them raise: there is no common base
            cause = getattr(error, "cause", error)  # in a worker
            what = (str(cause).strip().splitlines() or [type(cause).__name__])[0].rstrip(".")
            raise SourceError(f"The source '{self._spec}' cannot be read: {what}. Check its files.") from error


def _ray(spec: str) -> Any:
    """The library, quiet."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError:
        needed = "needs the optional extra 'ray'"
        raise SourceError(f"The source '{spec}' {needed}. Try: pip install \"omnidraft[ray]\"") from None
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what fails is told by our error
    return ray


def _started(ray: Any) -> Any:
    """Ray, joined or begun. Its answer to SIGTERM, to end at once, gives way to ours, which commits first."""
    if not ray.is_initialized():
        here = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ours = signal.getsignal(signal.SIGTERM)
        ray.init(**({} if ADDRESS in os.environ else here), log_to_driver=False, logging_level=logging.ERROR)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)
    return ray


def _found(path: str) -> tuple["FileSystem", list[str]]:
    """The files that a path or URI names, in the order of their names."""
    from pyarrow import fs

    place, _, query = path.partition("?") if "://" in path else (os.path.abspath(path), "", "")
    folder, _, last = place.rpartition("/")
    pattern = last if "*" in last else "*"
    base = folder if "*" in last else place
    files, root = fs.FileSystem.from_uri(f"{base}?{query}" if query else base)
    info = files.get_file_info(root)
    if info.type is fs.FileType.File:
        return files, [root]
    below = files.get_file_info(fs.FileSelector(root, allow_not_found=True, recursive="*" not in last))
    names = (one.path for one in below if one.type is fs.FileType.File and fnmatchcase(one.base_name, pattern))
    return files, sorted(name for name in names if name.lower().endswith(SUFFIXES))


def _name(spec: str) -> str:
    """A file's stem, or the folder's name."""
    place = spec.removeprefix(SPEC)
    path = PurePosixPath(place.partition("?")[0] if "://" in place else os.path.abspath(place))
    if "*" in path.name:
        return path.parent.name
    return path.stem if path.suffix.lower() in SUFFIXES else path.name


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def _rows(files: "FileSystem", columns: Collection[str], item: dict[str, str]) -> Iterator[dict[str, bytes]]:
    """The rows of one file, by a worker of Ray.

    A row travels pickled: Ray's own tables would give all rows the columns and types of all files.
    """
    path = item["path"]
    values = _parquet_rows(files, path, columns) if _is_parquet(path) else _json_rows(files, path)
    try:
        yield from ({"row": pickle.dumps(one)} for one in values)
    except Exception as error:
        raise OSError(f"'{path}': {error}") from error  # Ray's error would not name the file


def _parquet_rows(files: "FileSystem", path: str, columns: Collection[str]) -> Iterator[Values]:
    from pyarrow import parquet

    with files.open_input_file(path) as file:
        table = parquet.ParquetFile(file)
        present = [name for name in table.schema_arrow.names if name in columns]
        for batch in table.iter_batches(ROWS_PER_BATCH, columns=present, use_threads=False):
            yield from parquet_values(batch)


def _json_rows(files: "FileSystem", path: str) -> Iterator[Values]:
    with files.open_input_stream(path) as file:
        yield from (row.values for row in json_rows(io.BufferedReader(file)))


def _streamed(dataset: Any) -> Iterator[Values]:
    """The rows of a dataset in its order, read as they are asked for."""
    options = dataset.context
    options.execution_options.preserve_order = True
    options.enable_progress_bars = False
    options.target_max_block_size = BLOCK_BYTES
    for table in dataset.iter_batches(batch_size=ROWS_PER_BATCH, batch_format="pyarrow"):
        yield from map(pickle.loads, table.column("row").to_pylist())
