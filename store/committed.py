"""Events read back from what a run has committed."""

import heapq
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from store.errors import CorruptError
from store.events import PromptCompleted
from store.files import digest_of
from store.manifest import Manifest, Part, part_path
from store.partitions import read_manifests

_ROWS = 4096  # read at a time
_LEFT_OUT = ("seq", "prompt_text", "completion_text")


def completed_prompts(run_folder: Path) -> Iterator[PromptCompleted]:
    """All committed prompts in the order in which they were completed, without their texts.

    Those of partitions are told in the order of their clocks, which began together.

    Raises:
        CorruptError: a part is missing or cannot be read; it is named.
    """
    logs = (_prompts(folder, manifest) for folder, manifest in read_manifests(run_folder).items())
    return heapq.merge(*logs, key=attrgetter("finished"))


def _prompts(folder: Path, manifest: Manifest) -> Iterator[PromptCompleted]:
    for part in manifest.tables["prompts"]:
        yield from (PromptCompleted(prompt_text="", completion_text="", **row) for row in _rows(folder, part))


def _rows(run_folder: Path, part: Part) -> Iterator[dict[str, Any]]:
    path = part_path(run_folder, part)
    if digest_of(path) != part.sha256:
        raise CorruptError(
            f"{path} must be as it was committed to go on with the run, but is not; restore it from a copy"
        )
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name not in _LEFT_OUT]
            for batch in file.iter_batches(_ROWS, columns=columns):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise CorruptError(
            f"{path} must be readable to go on with the run, but: {error}; restore it from a copy"
        ) from error
