"""Write events as Parquet parts, and read parts back. A part is not visible before the manifest names it.

Every reader compares a part with its digest when it opens it first: once per part and process, as long as size and time
of the file stay the same. Damage is named by its file, and never read.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.errors import CorruptError
from store.events import PromptCompleted
from store.files import digest_of, write_whole
from store.log.manifest import MANIFEST, Manifest, Part, part_path
from store.log.partitions import read_manifests
from store.log.schema import COUNTS, QUICK_LEVEL, TABLES, LoggedEvent, parquet_options, schema_of, to_table

ROW_GROUP_ROWS = 122_880  # as DuckDB
_READ_ROWS = 4096  # at a time
_HASHING_THREADS = 4
_TEXTS = ("prompt_text", "completion_text")

_verified: dict[Path, tuple[int, int, str]] = {}  # size, time of change and digest of parts that were as committed


class PartWriter:
    """Writes the parts of one log; used by one thread. `before`: the parts that are already committed, by table."""

    def __init__(self, run_folder: Path, before: Mapping[str, Sequence[Part]]) -> None:
        self._folder = run_folder / MANIFEST.parent
        self._new: dict[str, list[Part]] = {table: [] for table in TABLES}
        self._rows = {table: sum(part.rows for part in before[table]) for table in TABLES}
        self._numbers = {table: highest_number(before[table]) for table in TABLES}

    def write(self, table: str, events: Sequence[LoggedEvent]) -> None:
        """Write these events as one part; their numbers follow those of the previous part."""
        self._numbers[table] += 1
        name = f"{table}/part-{self._numbers[table]:06d}.parquet"
        rows = to_table(table, self._rows[table], events)
        content = parquet_bytes(table, rows)
        write_whole(self._folder / name, content)
        self._new[table].append(part_of(name, rows, content))
        self._rows[table] += len(events)

    def take(self) -> Mapping[str, tuple[Part, ...]]:
        taken = {table: tuple(parts) for table, parts in self._new.items()}
        self._new = {table: [] for table in TABLES}
        return taken


def parquet_bytes(table: str, rows: pa.Table, level: int = QUICK_LEVEL) -> bytes:
    """Encode rows as the file of a part, with the table's name and the schema version in its metadata."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, rows.schema, **parquet_options(table, level)) as writer:
        writer.write_table(rows, ROW_GROUP_ROWS)
        writer.add_key_value_metadata({key.decode(): text.decode() for key, text in schema_of(table).metadata.items()})
    return bytes(sink.getvalue())


def part_of(name: str, rows: pa.Table, content: bytes) -> Part:
    """Build the manifest's entry of a file from its name in the log's folder, its rows and its content."""
    offsets = pc.min_max(rows["offset"]).as_py()
    digest = hashlib.sha256(content).hexdigest()
    return Part(name, rows.num_rows, len(content), digest, offsets["min"], offsets["max"])


def find_damage(parts: Iterable[tuple[Path, Part]], *, again: bool = False) -> dict[Path, str]:
    """Compare parts, each with the folder of its log, with what was committed. Returns what is wrong, by file.

    `again`: compute also the digests that this process has computed before.
    """

    def describe(named: tuple[Path, Part]) -> tuple[Path, str | None]:
        path = part_path(*named)
        if again:
            _verified.pop(path, None)
        return path, _describe_damage(path, named[1])

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return {path: wrong for path, wrong in pool.map(describe, parts) if wrong}


def _describe_damage(path: Path, part: Part) -> str | None:
    """Return what is wrong with the file of a part. A link would let a log read files outside its folder."""
    if path.is_symlink():
        return f"{path} must be a plain file, but is a link; put the file itself in its place"
    try:
        found = path.stat()
    except OSError:
        return f"{path} must be a file of {part.bytes} bytes, as in the manifest, but it is missing"
    if found.st_size != part.bytes:
        return f"{path} must be a file of {part.bytes} bytes, as in the manifest, but it has {found.st_size}"
    state = (found.st_size, found.st_mtime_ns, part.sha256)
    if _verified.get(path) != state:
        if digest_of(path) != part.sha256:
            return f"{path} must have the digest {part.sha256[:12]}... that was committed, but it was changed"
        _verified[path] = state
    return None


def read_part(run_folder: Path, part: Part, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows of a part, with all columns or a selection. Raises `CorruptError` if it is not as committed."""
    schema = schema_of(part.file.partition("/")[0])
    rows = pq.read_table(_require_sound(run_folder, part), columns=columns, partitioning=None)
    return rows.cast(pa.schema([schema.field(name) for name in rows.schema.names], schema.metadata))


def _require_sound(run_folder: Path, part: Part) -> Path:
    path = part_path(run_folder, part)
    if wrong := _describe_damage(path, part):
        raise CorruptError(f"{wrong}; restore it from a copy")
    return path


def completed_prompts(run_folder: Path) -> Iterator[PromptCompleted]:
    """Yield all committed prompts in the order of completion, without their texts.

    Prompts of several partitions are merged by `finished`; the clocks of partitions start together.
    """
    logs = (_read_prompts(folder, manifest) for folder, manifest in read_manifests(run_folder).items())
    return heapq.merge(*logs, key=attrgetter("finished"))


def _read_prompts(folder: Path, manifest: Manifest) -> Iterator[PromptCompleted]:
    columns = [name for name in schema_of("prompts").names if name not in ("seq", *_TEXTS)]
    for part in manifest.tables["prompts"]:
        with pq.ParquetFile(_require_sound(folder, part)) as file:
            for batch in file.iter_batches(_READ_ROWS, columns=columns):
                yield from (PromptCompleted(prompt_text="", completion_text="", **row) for row in batch.to_pylist())


def highest_number(parts: Sequence[Part]) -> int:
    """Return the number of the newest part, or 0; `part-000003-000007.parquet` joins parts 3 to 7."""
    return max((last_number(part.file) for part in parts), default=0)


def newest_number(tables: Mapping[str, Sequence[Part]], table: str) -> int:
    """Return the highest number of a committed part of the table; counts have the numbers of decisions."""
    return highest_number(tables["decisions" if table in COUNTS else table])


def last_number(file: str) -> int:
    """Return the number of a part; for a joined part, that of its last source."""
    return int(Path(file).stem.rpartition("-")[2])
