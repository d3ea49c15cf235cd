"""The file of a memory in a version's folder: what the target emitted, and how good its continuations were."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.memory.ngram_table import SLOT_BYTES, NgramTable
from stages.memory.text_memory import TextMemory
from store.errors import CorruptError

MEMORY_FILE = "memory.safetensors"


def write_memory(path: Path, memory: TextMemory, vocabularies: str) -> None:
    """Write a memory with its chances. Writes nothing for one without a table.

    Args:
        path: the file.
        memory: of one target.
        vocabularies: digest of the target's and the drafter's vocabulary, without which token ids mean nothing.

    Raises:
        OSError: the file cannot be written.
    """
    if memory.table is None:
        return
    slots, clock = memory.table.sizes
    hits, trials = (torch.tensor(cells, dtype=torch.float64) for cells in memory.calibration.cells)
    # One entry: the library writes several in any order, and equal memories must be equal files.
    content = json.dumps({"vocabularies": vocabularies, "slots": slots, "clock": clock})
    save_file({**memory.table.to_tensors(), "hits": hits, "trials": trials}, path, {"memory": content})


class _Content(NamedTuple):
    vocabularies: str
    sizes: tuple[int, int]
    cells: tuple[list[float], list[float]]
    tensors: dict[str, Tensor]


def _read(path: Path) -> _Content:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["memory"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
        cells = tensors.pop("hits").tolist(), tensors.pop("trials").tolist()
        return _Content(metadata["vocabularies"], (metadata["slots"], metadata["clock"]), cells, tensors)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} must hold the memory of a version, but: {error}") from error


def read_memory(path: Path, memory: TextMemory, vocabularies: str) -> bool:
    """Replace a memory by that of a file; of a larger one, what does not fit into the budget is evicted.

    Returns:
        whether the memory was read: not if it has no table, or if the file is of other vocabularies.

    Raises:
        CorruptError: the file is not one of a memory.
    """
    content = _read(path)
    if memory.table is None or content.vocabularies != vocabularies:
        return False
    memory.table.load(content.tensors, content.sizes)
    memory.calibration.load_cells(*content.cells)
    return True


def read_table(path: Path) -> NgramTable:
    """Read the table of a file, whatever its vocabularies. Raises CorruptError."""
    content = _read(path)
    table = NgramTable(content.sizes[0] * SLOT_BYTES)
    table.load_tensors(content.tensors, content.sizes)
    return table
