"""Read events back from the committed log of a run."""

import heapq
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from store.errors import CorruptError
from store.events import DraftSource, Origin, Outcome, PromptCompleted, TokenDecision, Translation
from store.files import digest_of
from store.log.manifest import Manifest, Part, part_path
from store.log.partitions import named_parts, read_manifests
from store.log.parts import read_part

_ROWS = 4096  # read at a time
_LEFT_OUT = ("seq", "prompt_text", "completion_text")
_ENUMS = {"translation": Translation, "outcome": Outcome, "origin": Origin, "drafter": DraftSource}
_LISTS = ("pieces", "drafter_levels", "target_levels")


def completed_prompts(run_folder: Path) -> Iterator[PromptCompleted]:
    """Yield all committed prompts in the order of completion, without their texts.

    Prompts of several partitions are merged by `finished`; the clocks of partitions start together.

    Raises:
        CorruptError: a part, which the message names, is missing or cannot be read.
    """
    logs = (_prompts(folder, manifest) for folder, manifest in read_manifests(run_folder).items())
    return heapq.merge(*logs, key=attrgetter("finished"))


def logged_decisions(run_folder: Path, most: int) -> list[TokenDecision]:
    """Return the first `most` decisions of a log, as they were appended. Raises what `read_manifest` raises."""
    events: list[TokenDecision] = []
    for folder, part in named_parts(run_folder, "decisions"):
        if len(events) >= most:
            break
        rows = read_part(folder, part).drop_columns("seq")
        events += _decisions(rows.slice(0, most - len(events)))
    return events


def _prompts(folder: Path, manifest: Manifest) -> Iterator[PromptCompleted]:
    for part in manifest.tables["prompts"]:
        yield from (PromptCompleted(prompt_text="", completion_text="", **row) for row in _rows(folder, part))


def _rows(run_folder: Path, part: Part) -> Iterator[dict[str, Any]]:
    path = part_path(run_folder, part)
    if digest_of(path) != part.sha256:
        raise CorruptError(f"{path} must be as it was committed to resume the run, but is not; restore it from a copy")
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name not in _LEFT_OUT]
            for batch in file.iter_batches(_ROWS, columns=columns):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise CorruptError(
            f"{path} must be readable to resume the run, but: {error}; restore it from a copy"
        ) from error


def _decisions(rows: pa.Table) -> list[TokenDecision]:
    columns = {name: rows[name].to_pylist() for name in rows.schema.names}
    for name, kind in _ENUMS.items():
        columns[name] = [None if value is None else kind(value) for value in columns[name]]
    for name in _LISTS:
        columns[name] = list(map(tuple, columns[name]))
    return [TokenDecision(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
