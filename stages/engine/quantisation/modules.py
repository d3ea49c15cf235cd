"""The codes of a model's linear modules, and a model that computes with the weights of few bits.

Shapes: O outputs, I inputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stages.engine.quantisation.groups import GROUP, GroupedMatrix

QUANTISED_BITS = {"int4": 4, "int8": 8}  # bits of the codes of weights that came without, by the format
ROUNDING = ("codes", "codes8", *QUANTISED_BITS)  # formats with which the inputs of matrices are rounded
_NAME = "omnidraft_groups"


def attach_groups(linear: nn.Module, groups: GroupedMatrix) -> None:
    """Store the codes that a module's weight was dequantised from."""
    linear.__dict__[_NAME] = groups


def mean_bytes(model: Any, weights: str) -> float:
    """Return how many bytes of memory a weight of the linear modules takes in a format, scales of codes included."""
    if weights not in ROUNDING:
        return float(model.dtype.itemsize)
    size, numbers = 0.0, 0
    for linear in _find_linears(model):
        groups: GroupedMatrix | None = linear.__dict__.get(_NAME)
        bits = QUANTISED_BITS.get(weights) if groups is None else groups.bits
        size += linear.weight.numel() * ((bits + 1) / 8 if bits else linear.weight.element_size())
        numbers += linear.weight.numel()
    return size / max(1, numbers)


@torch.no_grad()
def find_attached(linear: nn.Linear) -> GroupedMatrix | None:
    """Return the codes of a module's weight if they still give it, bit for bit in the weight's type."""
    groups: GroupedMatrix | None = linear.__dict__.get(_NAME)
    same = groups is not None and torch.equal(groups.dequantise().to(linear.weight.dtype), linear.weight)
    return groups if same else None


def find_groups(linear: nn.Linear, bits: int, *, quantise: bool) -> GroupedMatrix | None:
    """Return the codes of a module's weight.

    Args:
        linear: its attached codes are used if `find_attached` finds them.
        quantise: whether a weight without codes is quantised to these bits; else, None is returned for it. A weight
            that changed after codes were attached is always quantised.
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
    return any(_NAME in linear.__dict__ for linear in _find_linears(model))


@contextmanager
def round_weights(model: Any, weights: str) -> Iterator[None]:
    """Let the modules of a model compute with quantised weights; other formats change nothing.

    This is the model that kernels of that format are compared with. Matrices keep their type, and the output layer its
    weights.
    """
    output, bits, quantise = model.get_output_embeddings(), QUANTISED_BITS.get(weights), not has_groups(model)
    linears = [linear for linear in _find_linears(model) if linear is not output] if bits else []
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
