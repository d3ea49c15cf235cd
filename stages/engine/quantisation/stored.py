"""A quantised matrix as a file holds it: rows of blocks in a type of ggml, mapped and not read before they are needed.

Shapes: O outputs, I inputs, X bytes of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.engine.quantisation.groups import GroupedMatrix

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in the blocks of a type of ggml."""

    kind: str  # name of the type: Q4_K, Q6_K, ...
    inputs: int
    rows_OX: Bytes  # blocks of each output, a view of the file
    read: Callable[[str, Bytes], GroupedMatrix | None]  # gives the codes of rows, see `gguf_blocks.read_groups`
    order_O: Tensor | None = None  # which row of the file is which output; None: they are in the same order

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.rows_OX), self.inputs

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.rows_OX.nbytes

    def take(self, outputs_N: Tensor) -> "StoredMatrix":
        """Return some outputs: a copy of their blocks, in order."""
        rows_N = outputs_N if self.order_O is None else self.order_O[outputs_N]
        return StoredMatrix(self.kind, self.inputs, self.rows_OX[rows_N.numpy()], self.read)

    def dequantise(self, outputs_N: Tensor | None = None) -> Tensor:
        """Return the weights of some outputs, or of all, in float32 (N, I)."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        order = self.order_O if outputs_N is None else outputs_N if self.order_O is None else self.order_O[outputs_N]
        rows = self.rows_OX if order is None else self.rows_OX[order.numpy()]
        weight_NI = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[self.kind])
        return torch.from_numpy(weight_NI).reshape(-1, self.inputs)

    def read_groups(self) -> GroupedMatrix | None:
        """Return the codes; None if the type has no groups."""
        groups = self.read(self.kind, self.rows_OX)
        return groups if groups is None or self.order_O is None else groups.take(self.order_O)
