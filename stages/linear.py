"""One linear layer, computed in the way that is fastest for its number of rows.

On a CPU a matrix times one row is bound by reading the weights, times several rows by how they are laid out: oneDNN's
packed layout keeps both flat, plain layout is as good only where the weights fit the cache. Which is faster differs
between machines and sizes, so it is measured.

Shapes: N rows, I inputs, O outputs.
"""

from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from stages.measured import remembered

MANY_ROWS = 8  # what several rows are measured with
REPEATS = 15
CACHED_BYTES = 64 << 20  # more than the last cache holds of most processors


class Kernel(Protocol):
    """Computes x W^T + b for one weight."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """The outputs (N, O), in the type of the inputs."""
        ...


class Plain:
    """The weights as they lie."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._bias_O = weight_OI, bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See `Kernel`."""
        return functional.linear(x_NI, self._weight_OI, self._bias_O)


class Packed:
    """oneDNN's blocked layout, a copy of the weights. CPU only."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), MANY_ROWS)
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See `Kernel`."""
        outputs_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._packed, self._bias_O, "none", [], "")
        return outputs_NO


class Int8:
    """Weights in eight bits with one scale per output, inputs in eight bits with one scale per row.

    The scale of a row depends on nothing but the row, and the sums are of integers: the same row gives the same outputs
    whatever it is computed beside. So a model in these weights is one model, whether it reads a token alone or verifies
    eight, and exactness is with respect to it.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        scale_O1 = weight_OI.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        self._weight_IO = torch.round(weight_OI.float() / scale_O1).to(torch.int8).contiguous().t()
        self._scale_O, self._bias_O = scale_O1[:, 0].contiguous(), bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See `Kernel`."""
        scale_N1 = x_NI.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 127
        sums_NO = torch._int_mm(torch.round(x_NI / scale_N1).to(torch.int8), self._weight_IO)
        outputs_NO = (sums_NO * scale_N1).mul_(self._scale_O)
        return (outputs_NO if self._bias_O is None else outputs_NO.add_(self._bias_O)).to(x_NI.dtype)


class ByRows:
    """One kernel for a single row, another for several."""

    def __init__(self, single: Kernel, several: Kernel) -> None:
        self._single, self._several = single, several

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See `Kernel`."""
        return self._single(x_NI) if x_NI.shape[0] == 1 else self._several(x_NI)


KINDS: dict[str, type[Plain | Packed | Int8]] = {"plain": Plain, "packed": Packed, "int8": Int8}


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can pack these weights here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:  # oneDNN computes in it from AVX-512 on
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32


def make_kernel(weight_OI: Tensor, bias_O: Tensor | None, single: str, several: str) -> Kernel:
    """The kernel of these kinds (keys of `KINDS`) for one row and for several."""
    first = KINDS[single](weight_OI, bias_O)
    return first if single == several else ByRows(first, KINDS[several](weight_OI, bias_O))


def fastest(weight_OI: Tensor, rows: int) -> str:
    """Which of `plain` and `packed` is faster for that many rows of these weights on this machine."""
    if not can_pack(weight_OI) or not weight_OI.numel():
        return "plain"
    key = [list(weight_OI.shape), str(weight_OI.dtype), rows]
    kind: str = remembered("kernel", key, lambda: _measure(weight_OI, rows))
    return kind


def _measure(weight_OI: Tensor, rows: int) -> str:
    """The kind with the fastest of many runs in turn, over copies that do not fit the cache together."""
    copies = max(1, min(8, CACHED_BYTES // (weight_OI.numel() * weight_OI.element_size())))
    x_NI = torch.ones(rows, weight_OI.shape[1], dtype=weight_OI.dtype)  # drawing them would be a draw of the run's
    kernels = {kind: [KINDS[kind](weight_OI.clone(), None) for _ in range(copies)] for kind in ("plain", "packed")}
    seconds = dict.fromkeys(kernels, float("inf"))
    for _ in range(REPEATS):
        for kind, ones in kernels.items():
            started = perf_counter()
            for one in ones:
                one(x_NI)
            seconds[kind] = min(seconds[kind], perf_counter() - started)
    return min(seconds, key=lambda kind: seconds[kind])
