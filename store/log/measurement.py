"""Measure the size of a log on disk, and build logs of any size with the distribution of a real run.

`resample` samples whole prompts of a run with replacement. A sampled prompt has its decisions and blocks, a new offset
and id, and a new `seq` for its rows; drafter updates occur as often as in the real run. The log has parts as after a
compaction, or as a run writes them.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.errors import RunError
from store.files import write_whole
from store.log.compaction import count_decisions
from store.log.manifest import MANIFEST, Manifest, Part, part_path, read_manifest
from store.log.partitions import named_parts
from store.log.parts import parquet_bytes, part_of, read_part
from store.log.schema import TABLES, schema_of, to_current_schema

PART_ROWS = 1_000_000
REST = "(file)"  # bytes outside of columns: the footer with names, positions and statistics
_RESAMPLED = ("decisions", "blocks", "prompts")


def bytes_by_column(run_folder: Path, table: str = "decisions") -> dict[str, float]:
    """Return bytes on disk per row of a table, by column, the largest first; the sum is the size of all its parts.

    The result is empty if the table has no rows. Raises what `read_manifest` raises.
    """
    parts = named_parts(run_folder, table)
    sizes: Counter[str] = Counter()
    for folder, part in parts:
        columns = _column_bytes(part_path(folder, part))
        sizes.update(columns)
        sizes[REST] += part.bytes - columns.total()
    rows = sum(part.rows for _, part in parts)
    return {name: size / rows for name, size in sizes.most_common()}


def _column_bytes(path: Path) -> Counter[str]:
    file, sizes = pq.read_metadata(path), Counter[str]()
    for group in map(file.row_group, range(file.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            sizes[column.path_in_schema.partition(".")[0]] += column.total_compressed_size
    return sizes


def resample(
    source: Path, into: Path, rows: int, *, part_rows: int = PART_ROWS, counted: bool = True, seed: int = 0
) -> int:
    """Write a log of about `rows` decisions to the new folder `into`; return their exact number.

    Args:
        source: folder of the real run.
        into: folder of the run to be written.
        rows: minimum number of decisions; the last prompt is complete.
        part_rows: decisions in a part.
        counted: write counts for the parts, as for joined ones.
        seed: random seed of the sampling.

    Raises:
        RunError: the source has no decisions, or `into` has a log already.
    """
    if (into / MANIFEST).exists():
        raise RunError(f"{into} must not hold a log yet, but it does; name another folder")
    drawing = _Sampler(source, seed)
    parts: dict[str, list[Part]] = {table: [] for table in TABLES}
    written = number = 0
    while written < rows:
        number += 1
        drawn = drawing.next_tables(min(part_rows, rows - written))
        written += drawn["decisions"].num_rows
        made = drawn | (count_decisions(drawn["decisions"]) if counted else {})
        for table, of in made.items():
            if of.num_rows:
                parts[table].append(_write(into, table, number, of))
    tables = MappingProxyType({table: tuple(named) for table, named in parts.items()})
    manifest = replace(Manifest.empty(into.resolve().name), tables=tables, finished=True)
    write_whole(into / MANIFEST, manifest.to_json())
    return written


def _write(into: Path, table: str, number: int, rows: pa.Table) -> Part:
    name = f"{table}/part-{number:06d}.parquet"
    content = parquet_bytes(table, rows)
    (into / MANIFEST.parent / table).mkdir(parents=True, exist_ok=True)
    (into / MANIFEST.parent / name).write_bytes(content)
    return part_of(name, rows, content)


class _Sampler:
    """Samples prompts of a run and returns their rows."""

    def __init__(self, source: Path, seed: int) -> None:
        self._tables = {table: _rows(source, table) for table in _RESAMPLED}
        offsets = self._tables["prompts"]["offset"].to_numpy()
        if not len(offsets) or not self._tables["decisions"].num_rows:
            raise RunError(
                f"{source} must be a run with prompts and decisions, but it has none; see `omnidraft replay`"
            )
        numbers = {name: table["offset"].to_numpy() for name, table in self._tables.items()}
        self._begins = {name: np.searchsorted(found, offsets) for name, found in numbers.items()}
        ends = {name: np.searchsorted(found, offsets, "right") for name, found in numbers.items()}
        self._lengths = {name: ends[name] - self._begins[name] for name in _RESAMPLED}
        versions = pc.max(self._tables["prompts"]["drafter_version"]).as_py() + 1
        self._versions_per_prompt = versions / len(offsets)
        self._draws = np.random.default_rng(seed)
        self._seqs = dict.fromkeys(_RESAMPLED, 0)
        self._prompts = 0
        self._seconds = 0.0

    def next_tables(self, rows: int) -> dict[str, pa.Table]:
        """Sample the fewest prompts that have at least `rows` decisions together; return their rows by table."""
        lengths = self._lengths["decisions"]
        picked = self._draws.integers(len(lengths), size=int(rows / lengths.mean() * 1.5) + 100)
        enough = int(np.searchsorted(np.cumsum(lengths[picked]), rows)) + 1
        picked = picked[:enough]
        tables = {name: self._sample_rows(name, picked) for name in _RESAMPLED}
        self._prompts += len(picked)
        return tables

    def _sample_rows(self, name: str, picked: np.ndarray) -> pa.Table:
        counts = self._lengths[name][picked]
        rows = self._tables[name].take(pa.array(_ranges(self._begins[name][picked], counts)))
        offsets = np.repeat(np.arange(self._prompts, self._prompts + len(picked)), counts)
        changed = {
            "seq": np.arange(self._seqs[name], self._seqs[name] + len(offsets)),
            "offset": offsets,
            "drafter_version": (offsets * self._versions_per_prompt).astype(np.int64),
        }
        self._seqs[name] += len(offsets)
        if name == "prompts":
            changed |= self._times(rows)
        for column, values in changed.items():
            rows = _replace_column(rows, column, pa.array(values))
        return _replace_column(rows, "prompt_id", pa.array(offsets).cast(pa.string()))

    def _times(self, prompts: pa.Table) -> dict[str, np.ndarray]:
        """Return start and end times of prompts that run one after the other, each with its real duration."""
        seconds = prompts["finished"].to_numpy() - prompts["started"].to_numpy()
        finished = self._seconds + np.cumsum(seconds)
        self._seconds = float(finished[-1])
        return {"started": finished - seconds, "finished": finished}


def _rows(source: Path, table: str) -> pa.Table:
    """Return all rows of a table, sorted by prompt, in one chunk."""
    parts = read_manifest(source).tables[table]
    read = [to_current_schema(table, read_part(source, part)) for part in parts]
    rows = pa.concat_tables([schema_of(table).empty_table(), *read]).unify_dictionaries()
    return rows.sort_by([("offset", "ascending"), ("seq", "ascending")]).combine_chunks()


def _ranges(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate ranges of integers: counts[0] of them from begins[0], then counts[1] from begins[1], and so on."""
    before = np.cumsum(counts) - counts
    ranges: np.ndarray = np.arange(counts.sum()) + np.repeat(begins - before, counts)
    return ranges


def _replace_column(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """Replace the values of a column, if the table has a column of that name."""
    position = rows.schema.get_field_index(name)
    if position < 0:
        return rows
    field = rows.schema.field(position)
    return rows.set_column(position, field, values.cast(field.type))
