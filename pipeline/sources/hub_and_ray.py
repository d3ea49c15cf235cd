"""Rows of datasets that a library streams: from the Hugging Face hub, or by Ray Data from disks and object stores."""

import io
import logging
import os
import pickle
import re
import signal
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.sources.files import ROWS_PER_BATCH, json_columns, json_rows, read_parquet
from pipeline.sources.rows import Fault, Rows, SourceRow, import_extra
from store.errors import SourceError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

SPEC, ADDRESS = "ray:", "RAY_ADDRESS"
SUFFIXES = (".parquet", ".jsonl", ".ndjson")
BLOCK_BYTES = 16_000_000  # size of the blocks that Ray prefetches; its object store holds a bounded number of them
TASKS = 1000  # most tasks that share the files; each costs Ray some milliseconds

HUB_SPEC = re.compile(r"hf://(?P<owner>[^/:]+)/(?P<name>[^/:]+)(?:/(?P<config>[^:]+))?:(?P<split>[^:]+)")

Values = Mapping[str, object] | Fault


class HubRows(Rows):
    """One split of a dataset on the Hugging Face hub, streamed by the `datasets` library."""

    def __init__(self, spec: str) -> None:
        found = HUB_SPEC.fullmatch(spec)
        if not found:
            raise SourceError(f"A hub source must be 'hf://owner/dataset[/config]:split', got '{spec}'.")
        self._spec = spec
        self.dataset = found["name"]
        load_dataset = import_extra("datasets", "hub", spec).load_dataset
        with self._translate_errors():
            self._rows: Iterable[Mapping[str, object]] = load_dataset(
                f"{found['owner']}/{found['name']}", found["config"], split=found["split"], streaming=True
            )
            self.columns: Collection[str] | None = getattr(self._rows, "column_names", None)

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        with self._translate_errors():
            for line, values in enumerate(self._rows, start=1):
                yield SourceRow(line, values)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # network, file and dataset code have no common base class of errors
            what = f"{type(error).__name__}: {error}"
            hint = "Check the name, the split and the network, or download a file and name that."
            raise SourceError(f"The hub source '{self._spec}' cannot be read: {what}. {hint}") from error


class RayRows(Rows):
    """Rows of Parquet or JSON lines files, read by Ray's workers in the order of the file names.

    Ray prefetches until its object store is full, then waits. The line is the row's number in all files together, blank
    lines not counted. Ray is needed when the rows are read: the cluster that the process has joined, else the one that
    RAY_ADDRESS names, else one that is started for this process. Its workers must be able to import this package and to
    read the files at the same path. `spec` is `ray:` and a file, a folder, or files of a folder as `FOLDER/*.parquet`:
    a path of this machine, or a URI that pyarrow knows, such as `s3://bucket/prompts?region=eu-central-1`.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        _import_ray(spec)
        with self._translate_errors():
            self._files, self._paths = _find_files(spec.removeprefix(SPEC))
        suffixes = {PurePosixPath(path).suffix.lower() for path in self._paths}
        if len(suffixes) != 1:
            got = f"files of {', '.join(sorted(suffixes))}" if suffixes else "no such file"
            raise SourceError(
                f"The source '{spec}' must be files of one kind, {' or '.join(SUFFIXES)}, got {got}. "
                f"Name them as '{SPEC}FOLDER/*.parquet'."
            )
        self.dataset = _get_dataset_name(spec)
        with self._translate_errors():
            self.columns = self._read_columns()

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        with self._translate_errors():
            paths = [{"path": path} for path in self._paths]
            data = _start_ray(_import_ray(self._spec)).data
            files = data.from_items(paths, override_num_blocks=min(len(paths), TASKS))
            rows = files.flat_map(partial(_read_rows, self._files, frozenset(columns)))
            for line, values in enumerate(_stream_rows(rows), start=1):
                yield SourceRow(line, values)

    def _read_columns(self) -> Collection[str] | None:
        """Read the column names of the first file; None if they are unknown."""
        from pyarrow import parquet

        path = self._paths[0]
        if _is_parquet(path):
            with self._files.open_input_file(path) as file:
                names: list[str] = parquet.read_schema(file).names
                return names
        with self._files.open_input_stream(path) as file:
            return json_columns(io.BufferedReader(file))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except SourceError:
            raise
        except Exception as error:  # Ray, Arrow and their storage have no common base class of errors
            cause = getattr(error, "cause", error)  # in a worker
            what = (str(cause).strip().splitlines() or [type(cause).__name__])[0].rstrip(".")
            raise SourceError(f"The source '{self._spec}' cannot be read: {what}. Check its files.") from error


def _import_ray(spec: str) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_extra("ray", "ray", spec)
    import_module("ray.data")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # failures are reported by our own error
    return ray


def _start_ray(ray: Any) -> Any:
    """Join or start Ray, and restore our handler of SIGTERM, which commits first; Ray's handler ends at once."""
    if not ray.is_initialized():
        here = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        ours = signal.getsignal(signal.SIGTERM)
        ray.init(**({} if ADDRESS in os.environ else here), log_to_driver=False, logging_level=logging.ERROR)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)
    return ray


def _find_files(path: str) -> tuple["FileSystem", list[str]]:
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


def _get_dataset_name(spec: str) -> str:
    place = spec.removeprefix(SPEC)
    path = PurePosixPath(place.partition("?")[0] if "://" in place else os.path.abspath(place))
    if "*" in path.name:
        return path.parent.name
    return path.stem if path.suffix.lower() in SUFFIXES else path.name


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def _read_rows(files: "FileSystem", columns: Collection[str], item: dict[str, str]) -> Iterator[dict[str, bytes]]:
    """Yield the rows of one file, in a worker of Ray.

    A row is sent pickled: Ray's own tables would give all rows the columns and types of all files.
    """
    path = item["path"]
    try:
        values = _parquet_rows(files, path, columns) if _is_parquet(path) else _json_rows(files, path)
        yield from ({"row": pickle.dumps(one)} for one in values)
    except Exception as error:
        raise OSError(f"'{path}': {error}") from error  # Ray's error would not name the file


def _parquet_rows(files: "FileSystem", path: str, columns: Collection[str]) -> Iterator[Values]:
    from pyarrow import parquet

    with files.open_input_file(path) as file:
        yield from read_parquet(parquet.ParquetFile(file), columns)


def _json_rows(files: "FileSystem", path: str) -> Iterator[Values]:
    with files.open_input_stream(path) as file:
        yield from (row.values for row in json_rows(io.BufferedReader(file)))


def _stream_rows(dataset: Any) -> Iterator[Values]:
    """Yield the rows of a dataset in order, read on demand."""
    options = dataset.context
    options.execution_options.preserve_order = True
    options.enable_progress_bars = False
    options.target_max_block_size = BLOCK_BYTES
    for table in dataset.iter_batches(batch_size=ROWS_PER_BATCH, batch_format="pyarrow"):
        yield from map(pickle.loads, table.column("row").to_pylist())
