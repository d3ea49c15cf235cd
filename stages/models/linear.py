"""Kernels of one linear layer; the fastest one for a number of rows is chosen by measurement.

On a CPU a matrix times one row is bound by reading the weights, times several rows by the layout of the weights:
oneDNN's packed layout is fast for both, the dense layout only if the weights fit the cache. The faster one differs
between machines and sizes, so it is measured.

Shapes: N rows, I inputs, O outputs.
"""

from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from stages.models.measurements import Measurements

MANY_ROWS = 8  # number of rows that stands for several in measurements
REPEATS = 15
CACHED_BYTES = 64 << 20  # larger than the last-level cache of most processors


class Kernel(Protocol):
    """Computes x W^T + b for one weight."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return the outputs (N, O), in the type of the inputs."""
        ...


class DenseLinear(Kernel):
    """The weights in their dense layout, not copied."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._bias_O = weight_OI, bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        return functional.linear(x_NI, self._weight_OI, self._bias_O)


class PackedLinear(Kernel):
    """oneDNN's blocked layout, a copy of the weights. CPU only."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), MANY_ROWS)
        self._bias_O = bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        outputs_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._packed, self._bias_O, "none", [], "")
        return outputs_NO


class Int8Linear(Kernel):
    """Weights in eight bits with one scale per output, inputs in eight bits with one scale per row.

    The scale of a row depends on that row only, and the sums are of integers, so a row has the same outputs in every
    batch. A model with these weights therefore computes the same whether it decodes one token or verifies eight, and
    exactness is with respect to it.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        scale_O1 = weight_OI.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        self._weight_IO = torch.round(weight_OI.float() / scale_O1).to(torch.int8).contiguous().t()
        self._scale_O, self._bias_O = scale_O1[:, 0].contiguous(), bias_O

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        scale_N1 = x_NI.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 127
        sums_NO = torch._int_mm(torch.round(x_NI / scale_N1).to(torch.int8), self._weight_IO)
        outputs_NO = (sums_NO * scale_N1).mul_(self._scale_O)
        return (outputs_NO if self._bias_O is None else outputs_NO.add_(self._bias_O)).to(x_NI.dtype)


class ByRowsLinear(Kernel):
    """One kernel for a single row, another for several."""

    def __init__(self, single: Kernel, several: Kernel) -> None:
        self._single, self._several = single, several

    @override
    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._single(x_NI) if x_NI.shape[0] == 1 else self._several(x_NI)


KINDS: dict[str, type[DenseLinear | PackedLinear | Int8Linear]] = {
    "plain": DenseLinear,
    "packed": PackedLinear,
    "int8": Int8Linear,
}


def can_pack(weight: Tensor) -> bool:
    """Check whether oneDNN can pack these weights on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:  # oneDNN computes in it from AVX-512 on
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return weight.dtype == torch.float32


def make_kernel(weight_OI: Tensor, bias_O: Tensor | None, single: str, several: str) -> Kernel:
    """Make a kernel of one kind (a key of `KINDS`) for a single row and of another for several rows."""
    first = KINDS[single](weight_OI, bias_O)
    return first if single == several else ByRowsLinear(first, KINDS[several](weight_OI, bias_O))


def pick_fastest(weight_OI: Tensor, rows: int, measurements: Measurements) -> str:
    """Return the faster of `plain` and `packed` for that many rows of these weights on this machine."""
    if not can_pack(weight_OI) or not weight_OI.numel():
        return "plain"
    key = [list(weight_OI.shape), str(weight_OI.dtype), rows]
    kind: str = measurements.get_or_measure("kernel", key, lambda: _measure(weight_OI, rows))
    return kind


def _measure(weight_OI: Tensor, rows: int) -> str:
    """Time both kinds in turn, over copies that do not fit the cache together; return the kind of the fastest run."""
    copies = max(1, min(8, CACHED_BYTES // (weight_OI.numel() * weight_OI.element_size())))
    x_NI = torch.ones(
        rows, weight_OI.shape[1], dtype=weight_OI.dtype
    )  # random inputs would advance the generator of the run
    kernels = {kind: [KINDS[kind](weight_OI.clone(), None) for _ in range(copies)] for kind in ("plain", "packed")}
    seconds = dict.fromkeys(kernels, float("inf"))
    for _ in range(REPEATS):
        for kind, ones in kernels.items():
            started = perf_counter()
            for one in ones:
                one(x_NI)
            seconds[kind] = min(seconds[kind], perf_counter() - started)
    return min(seconds, key=lambda kind: seconds[kind])
