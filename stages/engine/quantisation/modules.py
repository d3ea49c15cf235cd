"""The codes of linear modules, modules whose weights stay in a file, and a model that computes with the weights
of few bits.

Shapes: O outputs, I inputs, N rows.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from stages.engine.quantisation.groups import GROUP, GroupedMatrix
from stages.engine.quantisation.stored import Codes, StoredMatrix

QUANTISED_BITS = {"int4": 4, "int8": 8}  # bits of the codes of weights that came without, by the format
ROUNDING = ("codes", "codes8", *QUANTISED_BITS)  # formats with which the inputs of matrices are rounded
_NAME = "omnidraft_groups"
WEIGHTS_AT_ONCE = 1 << 22  # of a mapped module that are in memory while it computes


class MappedLinear(nn.Linear):
    """A linear module whose weight is a matrix of a file; a few outputs at a time are dequantised to compute them."""

    def __init__(self, stored: StoredMatrix, bias_O: Tensor | None) -> None:
        nn.Module.__init__(self)  # that of `nn.Linear` makes a weight
        self.out_features, self.in_features = stored.shape
        self.stored = stored
        self.register_parameter("bias", None if bias_O is None else nn.Parameter(bias_O))

    @property
    def weight(self) -> Tensor:  # type: ignore[override] # it is trained nowhere
        """The whole weight in float32, dequantised at each call."""
        weight_OI = self.stored.dequantise()
        self.stored.release()
        return weight_OI

    @override
    def forward(self, input: Tensor) -> Tensor:
        input_NI = input.flatten(0, -2)
        output_NO = input.new_empty(len(input_NI), self.out_features)
        for outputs, weight_QI in self.stored.iterate(WEIGHTS_AT_ONCE):
            torch.mm(input_NI, weight_QI.T, out=output_NO[:, outputs])
        self.stored.release()
        if self.bias is not None:
            output_NO += self.bias
        return output_NO.view(*input.shape[:-1], -1)


class MappedEmbedding(nn.Embedding):
    """An embedding whose rows stay in a file. `scale` multiplies what it returns."""

    def __init__(self, stored: StoredMatrix, scale: float) -> None:
        nn.Module.__init__(self)  # as above
        self.num_embeddings, self.embedding_dim = stored.shape
        self.padding_idx = self.max_norm = None
        self.stored, self.scale = stored, scale

    @property
    def weight(self) -> Tensor:  # type: ignore[override] # as above
        """The whole weight in float32, dequantised at each call."""
        return self.stored.dequantise()

    @override
    def forward(self, input: Tensor) -> Tensor:
        rows = self.stored.dequantise(input.flatten()).view(*input.shape, -1)
        return rows if self.scale == 1 else rows * self.scale


def find_stored(module: Any) -> StoredMatrix | None:
    """Return the matrix of a module whose weight stays in a file; None for others."""
    return module.stored if isinstance(module, MappedLinear | MappedEmbedding) else None


def weight_shape(module: Any) -> tuple[int, int]:
    """Return the rows and columns of the weight of a linear module or an embedding."""
    stored = find_stored(module)
    rows, columns = module.weight.shape if stored is None else stored.shape
    return rows, columns


def iterate_weights(model: Any) -> Iterator[Tensor | StoredMatrix]:
    """Yield every weight of a model once, in the order in which it would be among the parameters of plain modules."""
    own = (weight for module in model.modules() for weight in (find_stored(module), *module._parameters.values()))
    yield from {id(weight): weight for weight in own if weight is not None}.values()


def count_weights(model: Any) -> int:
    """Return the number of weights of a model."""
    return sum(weight.numel() for weight in iterate_weights(model))


def is_mapped(model: Any) -> bool:
    """Whether weights of a model stay in files."""
    return any(find_stored(module) is not None for module in model.modules())


def read_state(model: Any) -> dict[str, Tensor]:
    """Return what `state_dict` does, with the weights that stay in files, in float32."""
    mapped = {f"{name}.weight": module.weight for name, module in model.named_modules() if find_stored(module)}
    if model.config.tie_word_embeddings:
        mapped.pop("lm_head.weight", None)
    own: dict[str, Tensor] = model.state_dict()
    return own | mapped


def attach_groups(linear: nn.Module, groups: Codes) -> None:
    """Store the codes that a module's weight was dequantised from."""
    linear.__dict__[_NAME] = groups


def mean_bytes(model: Any, weights: str) -> float:
    """Return how many bytes of memory a weight of the linear modules takes in a format, scales of codes included."""
    size, numbers = 0.0, 0
    for linear in _find_linears(model):
        codes, count = find_stored(linear) or linear.__dict__.get(_NAME), math.prod(weight_shape(linear))
        if isinstance(codes, StoredMatrix):
            size += codes.size
        else:
            bits = codes.bits if codes else QUANTISED_BITS.get(weights)
            size += count * (bits / 8 + 8 / GROUP if bits else model.dtype.itemsize)  # two scales of 32 bits a group
        numbers += count
    return size / max(1, numbers)


@torch.no_grad()
def find_attached(linear: nn.Linear) -> Codes | None:
    """Return the codes of a module's weight if they still give it, bit for bit in the weight's type."""
    if (stored := find_stored(linear)) is not None:
        return stored if stored.has_codes else None
    groups: Codes | None = linear.__dict__.get(_NAME)
    same = groups is not None and torch.equal(groups.dequantise().to(linear.weight.dtype), linear.weight)
    return groups if same else None


def find_groups(linear: nn.Linear, bits: int, *, quantise: bool) -> Codes | None:
    """Return the codes of a module's weight. Its attached codes are used if `find_attached` finds them. `quantise`:
    whether a weight without codes is quantised to these bits; else None is returned for it. A weight that changed after
    codes were attached is always quantised.
    """
    attached = find_attached(linear)
    if attached is not None:
        return attached
    fits = linear.weight.shape[1] % GROUP == 0 and linear.weight.numel() > 0
    return GroupedMatrix.quantise(linear.weight, bits) if fits and (quantise or _NAME in linear.__dict__) else None


def drop_groups(model: Any) -> None:
    """Forget the codes of all linear modules."""
    for linear in _find_linears(model):
        linear.__dict__.pop(_NAME, None)


def has_groups(model: Any) -> bool:
    """Whether any linear module has codes: the others then have more bits in the file that was read, and keep them."""
    stored = map(find_stored, _find_linears(model))
    attached = any(_NAME in linear.__dict__ for linear in _find_linears(model))
    return attached or any(matrix is not None and matrix.has_codes for matrix in stored)


@contextmanager
def round_weights(model: Any, weights: str) -> Iterator[None]:
    """Let the modules of a model compute with quantised weights; other formats change nothing.

    This is the model that kernels of that format are compared with. Matrices keep their type, and the output layer its
    weights.
    """
    output, bits, quantise = model.get_output_embeddings(), QUANTISED_BITS.get(weights), not has_groups(model)
    own = [linear for linear in _find_linears(model) if linear is not output and find_stored(linear) is None]
    linears = own if bits else []  # mapped ones compute with their codes
    saved = [(linear, linear.weight, linear.__dict__.get(_NAME)) for linear in linears]
    try:
        for linear in linears:
            groups = find_groups(linear, bits or 0, quantise=quantise)
            if groups is not None:
                linear.weight = nn.Parameter(groups.dequantise().to(linear.weight.dtype), requires_grad=False)
                attach_groups(linear, groups)
        yield
    finally:
        for linear, weight_OI, attached in saved:
            linear.weight = weight_OI
            linear.__dict__.pop(_NAME, None)
            if attached is not None:
                attach_groups(linear, attached)


def _find_linears(model: Any) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]
