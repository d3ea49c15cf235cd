"""A matrix as a file holds it: rows of blocks in a type of ggml, mapped and not read before they are needed.

Shapes: O outputs, I inputs, X bytes of a row or of a block, N rows that are wanted.
"""

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.engine.quantisation.groups import GroupedMatrix
from stages.engine.quantisation.layouts import read_groups

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
PART_BYTES = 1 << 19  # of blocks that are dequantised at a time: fewer calls, in a cache
NUMBER_TYPES = ("BF16", "F16")  # without codes: each block is a number
KEPT_WEIGHTS = 4 << 20  # of rows that were looked up and are kept in float32


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in the blocks of a type of ggml."""

    kind: str  # name of the type, one of `FILE_KINDS` or `NUMBER_TYPES`: Q4_K, Q6_K, BF16, ...
    inputs: int
    rows_OX: Bytes  # blocks of each output, a view of the file
    order_O: Tensor | None = None  # which row of the file is which output; None: they are in the same order

    def __deepcopy__(self, memo: object) -> "StoredMatrix":
        return self  # a copy would be one of the file

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.rows_OX), self.inputs

    @property
    def has_codes(self) -> bool:
        return self.kind not in NUMBER_TYPES

    def numel(self) -> int:
        """Return the number of weights, as a tensor does."""
        return len(self.rows_OX) * self.inputs

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.rows_OX.nbytes

    def take(self, outputs_N: Tensor) -> "StoredMatrix":
        """Return some outputs: a copy of their blocks, in order."""
        return StoredMatrix(self.kind, self.inputs, self.rows_OX[self._find_rows(outputs_N)])

    def dequantise(self, outputs_N: Tensor | None = None) -> Tensor:
        """Return the weights of some outputs, or of all, in float32 (N, I)."""
        rows_NX = self._take_rows(slice(None)) if outputs_N is None else self.rows_OX[self._find_rows(outputs_N)]
        weights_NI = np.empty((len(rows_NX), self.inputs), np.float32)
        self._write_weights(rows_NX, weights_NI)
        return torch.from_numpy(weights_NI)

    def iterate(self, weights: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield consecutive outputs and their weights in float32, about so many at a time, in memory that is written
        again after the next ones. Those are made meanwhile: by one thread, since more would wait for the interpreter.
        """
        step = min(max(1, weights // self.inputs), len(self.rows_OX))
        memory = cycle([np.empty((step, self.inputs), np.float32) for _ in range(2)])

        def make(start: int) -> tuple[slice, Tensor]:
            rows_NX = self._take_rows(slice(start, start + step))
            weights_NI = next(memory)[: len(rows_NX)]
            self._write_weights(rows_NX, weights_NI)
            return slice(start, start + len(rows_NX)), torch.from_numpy(weights_NI)

        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(make, 0)
            for start in range(step, len(self.rows_OX), step):
                done, made = made.result(), thread.submit(make, start)
                yield done
            yield made.result()

    def sample(self, step: int) -> Tensor:
        """Return every `step`-th of all weights, output after output, in float32, with the library's signs of zeros."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[self.kind]
        block, size = GGML_QUANT_SIZES[kind]
        places = np.arange(0, self.numel(), step)
        rows = self._find_rows(torch.from_numpy(places // self.inputs))
        blocks_NX = self.rows_OX.reshape(len(self.rows_OX), -1, size)[rows, places % self.inputs // block]
        weights = dequantize(blocks_NX, kind).reshape(-1, block)
        return torch.from_numpy(weights[np.arange(len(places)), places % block])

    def is_finite(self) -> bool:
        """Whether every number of a matrix without codes is finite: of others, not all bits of the exponent are set."""
        exponent = 0x7C00 if self.kind == "F16" else 0x7F80
        step = max(1, PART_BYTES // self.rows_OX.shape[1])
        parts = (self.rows_OX[start : start + step].view("<u2") for start in range(0, len(self.rows_OX), step))
        finite = all(((part_NI & exponent) != exponent).all() for part_NI in parts)
        self.release()
        return finite

    def release(self) -> None:
        """Give back the memory of the file's pages that were read; they are read again where they are needed."""
        release_pages(self.rows_OX)

    def _find_rows(self, outputs_N: Tensor) -> Any:
        """Return which rows of the file are these outputs."""
        return (outputs_N if self.order_O is None else self.order_O[outputs_N]).numpy()

    def _take_rows(self, outputs: slice) -> Bytes:
        """Return the blocks of consecutive outputs."""
        return self.rows_OX[outputs if self.order_O is None else self.order_O[outputs].numpy()]

    def _write_weights(self, rows_NX: Bytes, weights_NI: Floats) -> None:
        """Write the weights of rows of blocks."""
        if not self.has_codes:
            short = self.kind == "F16"
            weights_NI[...] = rows_NX.view("<f2") if short else (rows_NX.view("<u2").astype("<u4") << 16).view("<f4")
            return
        step = max(1, PART_BYTES // max(1, rows_NX.shape[1]))
        for start in range(0, len(rows_NX), step):
            groups = read_groups(self.kind, rows_NX[start : start + step])
            weights_NGX = weights_NI[start : start + step].reshape(*groups.scale_OG.shape, -1)
            weights_NGX[...] = groups.codes_OI.numpy().reshape(weights_NGX.shape)
            weights_NGX *= groups.scale_OG.numpy()[..., None]
            weights_NGX += groups.minimum_OG.numpy()[..., None]


def release_pages(rows: Bytes) -> None:
    """Give back the memory of what was read of a view of a file; do nothing for other arrays."""
    owner: Any = rows
    while isinstance(owner, np.ndarray):
        owner = owner.base
    file = owner.obj if isinstance(owner, memoryview) else None
    if isinstance(file, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        start = rows.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
        begin = start - start % mmap.PAGESIZE
        file.madvise(mmap.MADV_DONTNEED, begin, start + rows.nbytes - begin)


Codes = GroupedMatrix | StoredMatrix  # of a matrix: those that it was quantised to here, or those of a file


class StoredRows:
    """Rows of a stored matrix in float32, of which those that were looked up last are kept."""

    def __init__(self, stored: StoredMatrix) -> None:
        self._stored, self._kept = stored, dict[int, Floats]()
        self._most = KEPT_WEIGHTS // stored.inputs

    def __getitem__(self, rows_N: Sequence[int]) -> Floats:
        """Return rows (N, I), which may occur repeatedly."""
        kept, wanted = self._kept, dict.fromkeys(rows_N)
        missing = [row for row in wanted if row not in kept]
        if missing and len(kept) + len(missing) > self._most:  # another thread may still read the old ones
            self._kept, missing = {}, list(wanted)
            kept = self._kept
        if missing:
            kept.update(zip(missing, self._stored.dequantise(torch.tensor(missing)).numpy(), strict=True))
        return np.stack([kept[row] for row in rows_N])
