"""Events read back from what a run has committed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from store.errors import CorruptError
from store.events import PromptCompleted
from store.manifest import Part, part_path, read_manifest

_ROWS = 4096  # read at a time


def completed_prompts(run_folder: Path) -> Iterator[PromptCompleted]:
    """All committed prompts in the order in which they were completed.

    Raises:
        CorruptError: a part is missing or cannot be read; it is named.
    """
    for part in read_manifest(run_folder).tables["prompts"]:
        yield from (PromptCompleted(**row) for row in _rows(run_folder, part))


def _rows(run_folder: Path, part: Part) -> Iterator[dict[str, Any]]:
    path = part_path(run_folder, part)
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                for row in batch.to_pylist():
                    del row["seq"]
                    yield row
    except (OSError, ValueError) as error:
        raise CorruptError(
            f"{path} must be readable to go on with the run, but: {error}; restore it from a copy"
        ) from error
