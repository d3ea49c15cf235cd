"""A log as large as wanted, with the distribution of a real run: its prompts drawn again and again, whole.

A drawn prompt brings its decisions and blocks. It gets a new offset and id and its rows a new `seq`; versions of the
drafter follow each other as often as in the real run. The log is as a compaction leaves one, or as a run does.
"""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from store.compact import counts_of
from store.errors import RunError
from store.files import write_whole
from store.manifest import MANIFEST, Manifest, Part, part_path, read_manifest
from store.parts import parquet_bytes, part_of
from store.schema import TABLES, schema_of

PART_ROWS = 1_000_000
_RESAMPLED = ("decisions", "blocks", "prompts")


def resample(
    source: Path, into: Path, rows: int, *, part_rows: int = PART_ROWS, counted: bool = True, seed: int = 0
) -> int:
    """Write a log of about `rows` decisions to the new folder `into`; the number it has in fact.

    Args:
        source: folder of the real run.
        into: folder of the run to be made.
        rows: of `decisions`, at least; the last prompt is whole.
        part_rows: decisions in a part.
        counted: whether the parts have counts beside them, as joined ones have.
        seed: of the draws.

    Raises `RunError` when the source has no decisions or `into` holds a log already.
    """
    if (into / MANIFEST).exists():
        raise RunError(f"{into} must not hold a log yet, but it does; name another folder")
    drawing = _Drawing(source, seed)
    parts: dict[str, list[Part]] = {table: [] for table in TABLES}
    written = number = 0
    while written < rows:
        number += 1
        drawn = drawing.next_tables(min(part_rows, rows - written))
        written += drawn["decisions"].num_rows
        made = drawn | (counts_of(drawn["decisions"]) if counted else {})
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


class _Drawing:
    """Draws prompts of a run and gives the rows that they bring."""

    def __init__(self, source: Path, seed: int) -> None:
        self._tables = {table: _rows(source, table) for table in _RESAMPLED}
        offsets = self._tables["prompts"]["offset"].to_numpy()
        if not len(offsets) or not self._tables["decisions"].num_rows:
            raise RunError(
                f"{source} must be a run with prompts and decisions, but it has none; see `omnidraft replay`"
            )
        self._begins = {
            name: np.searchsorted(table["offset"].to_numpy(), offsets) for name, table in self._tables.items()
        }
        ends = {
            name: np.searchsorted(table["offset"].to_numpy(), offsets, "right") for name, table in self._tables.items()
        }
        self._lengths = {name: ends[name] - self._begins[name] for name in _RESAMPLED}
        versions = pc.max(self._tables["prompts"]["drafter_version"]).as_py() + 1
        self._versions_per_prompt = versions / len(offsets)
        self._draws = np.random.default_rng(seed)
        self._seqs = dict.fromkeys(_RESAMPLED, 0)
        self._prompts = 0
        self._seconds = 0.0

    def next_tables(self, rows: int) -> dict[str, pa.Table]:
        """Prompts with at least `rows` decisions together, and not one more than needed."""
        lengths = self._lengths["decisions"]
        picked = self._draws.integers(len(lengths), size=int(rows / lengths.mean() * 1.5) + 100)
        enough = int(np.searchsorted(np.cumsum(lengths[picked]), rows)) + 1
        picked = picked[:enough]
        tables = {name: self._drawn(name, picked) for name in _RESAMPLED}
        self._prompts += len(picked)
        return tables

    def _drawn(self, name: str, picked: np.ndarray) -> pa.Table:
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
            rows = _with_column(rows, column, pa.array(values))
        return _with_column(rows, "prompt_id", pa.array(offsets).cast(pa.string()))

    def _times(self, prompts: pa.Table) -> dict[str, np.ndarray]:
        """One prompt after the other, each as long as it was."""
        seconds = prompts["finished"].to_numpy() - prompts["started"].to_numpy()
        finished = self._seconds + np.cumsum(seconds)
        self._seconds = float(finished[-1])
        return {"started": finished - seconds, "finished": finished}


def _rows(source: Path, table: str) -> pa.Table:
    """All rows of a table, prompt by prompt, in one chunk."""
    parts = read_manifest(source).tables[table]
    read = [pq.read_table(part_path(source, part), partitioning=None).cast(schema_of(table)) for part in parts]
    rows = pa.concat_tables([schema_of(table).empty_table(), *read]).unify_dictionaries()
    return rows.sort_by([("offset", "ascending"), ("seq", "ascending")]).combine_chunks()


def _ranges(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, ... for counts[0] numbers, then those from begins[1] on, and so forth."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(begins - before, counts)


def _with_column(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """The table with these values in a column, where it has one of that name."""
    position = rows.schema.get_field_index(name)
    if position < 0:
        return rows
    field = rows.schema.field(position)
    return rows.set_column(position, field, values.cast(field.type))
