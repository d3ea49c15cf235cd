"""Matrices in the layout that compiled products read (`stages/engine/compiled/products.py`).

Shapes: O outputs, I inputs, G groups of inputs, B blocks of outputs, L outputs of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from stages.engine.compiled.llvm.emitter import VECTOR_SIZE
from stages.engine.compiled.products import COLUMNS, ProductKind
from stages.engine.forward_pass.kernels import Matrix, join_matrices
from stages.engine.quantisation.groups import GROUP, GroupedMatrix

BLOCK = VECTOR_SIZE * COLUMNS  # outputs that are computed together


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in blocks of outputs."""

    kind: ProductKind  # how it is stored
    outputs: int  # number of outputs, without the padding of the last block
    groups: int
    data: Tensor  # its codes or numbers
    scales_BGL: Tensor  # of codes; G is twice as large where a group has two scales; empty without any
    minima_BGL: Tensor
    bias_O: Tensor | None  # float32, padded; None without one

    @property
    def blocks(self) -> int:
        """Number of blocks of outputs: a multiple of those that are computed together."""
        return -(-self.outputs // BLOCK) * COLUMNS

    @property
    def padded(self) -> int:
        return self.blocks * VECTOR_SIZE


def can_pack_inputs(inputs: int) -> bool:
    """Whether a matrix with that many inputs can be packed: they must divide into groups."""
    return inputs > 0 and inputs % GROUP == 0


def widen_codes(groups: GroupedMatrix) -> GroupedMatrix | None:
    """Return the same weights with codes of the next number of bits that products read, the code of 0 in the middle if
    it is there. None if no product reads them: groups of 16 that have minima.
    """
    if groups.size < GROUP and not is_centred(groups):
        return None
    bits = 4 if groups.bits <= 4 else 8
    added = (1 << bits - 1) - (1 << groups.bits - 1) if is_centred(groups) else 0
    minimum_OG = groups.minimum_OG - added * groups.scale_OG
    return GroupedMatrix(groups.codes_OI + added, groups.scale_OG, minimum_OG, bits)


def is_centred(groups: GroupedMatrix) -> bool:
    """Check whether the code in the middle of the range stands for 0 in all groups."""
    return torch.equal(groups.minimum_OG, -(1 << groups.bits - 1) * groups.scale_OG)


def pack_matrices(parts: Sequence[Matrix], *, input_bits: int) -> list[PackedMatrix]:
    """Pack matrices of the same inputs, whose outputs follow each other: as one where they are stored alike."""
    runs = [join_matrices(list(run)) for _, run in groupby(parts, key=_describe_codes)]
    filled = all(len(run.weight_OI) % BLOCK == 0 for run in runs[:-1])
    if not filled or len({run.groups is None for run in runs}) > 1:  # numbers and codes read other inputs
        runs = [join_matrices([part.without_codes() for part in parts])]
    return [pack_matrix(run.weight_OI, run.bias_O, run.groups, input_bits=input_bits) for run in runs]


def _describe_codes(matrix: Matrix) -> tuple[int, int, bool] | None:
    """Return what the codes of matrices that are stored alike have in common; None without codes."""
    groups = matrix.groups
    return None if groups is None else (groups.bits, groups.size, is_centred(groups))


def pack_matrix(
    weight_OI: Tensor, bias_O: Tensor | None, groups: GroupedMatrix | None, *, input_bits: int
) -> PackedMatrix:
    """Pack a matrix: its codes if it has any; else its numbers, in bfloat16 if that keeps them.

    Args:
        weight_OI: weights, whose inputs `can_pack_inputs`.
        groups: codes of these weights, as `widen_codes` returns them.
        input_bits: 32, or those that inputs are rounded to; numbers that are no codes are multiplied unrounded.
    """
    bias = None if bias_O is None else _pad(bias_O.float()).contiguous()
    outputs, inputs = weight_OI.shape
    if groups is None:
        short_OI = weight_OI.bfloat16()
        exact = torch.equal(short_OI.to(weight_OI.dtype), weight_OI)
        numbers_OI = short_OI if exact else weight_OI.float()
        data = _pad(numbers_OI).view(-1, VECTOR_SIZE, inputs).transpose(1, 2).contiguous()
        nothing = torch.empty(0)
        return PackedMatrix(ProductKind(16 if exact else 32), outputs, inputs // GROUP, data, nothing, nothing, bias)
    signed = is_centred(groups)
    stored = [groups.scale_OG] if signed else [groups.scale_OG, groups.minimum_OG]
    wide = not all(torch.equal(values.half().float(), values) for values in stored)
    scales, minima = (
        _pad(one_OG.to(torch.float32 if wide else torch.float16)).unflatten(0, (-1, VECTOR_SIZE)).mT.contiguous()
        for one_OG in (groups.scale_OG, torch.empty(0, 1) if signed else groups.minimum_OG)
    )
    kind = ProductKind(groups.bits, wide, input_bits, signed, GROUP // groups.size)
    middle = 1 << groups.bits - 1 if signed and input_bits > 8 else 0
    data = pack_codes(_pad(groups.codes_OI ^ middle), groups.bits, 8 if input_bits == 8 else 16)
    return PackedMatrix(kind, outputs, inputs // GROUP, data, scales, minima, bias)


def pack_codes(codes_OI: Tensor, bits: int, part: int = 16) -> Tensor:
    """Return codes as numbers of 32 bits (B, G, vectors, L), so that a shift and a mask give consecutive inputs' codes,
    each in a part of the number: of the inputs in one, the even ones are in its low half and the odd ones in its high
    half, or every fourth is in the same byte.

    >>> codes_OI = torch.arange(GROUP).repeat(VECTOR_SIZE, 1).to(torch.uint8) % 16
    >>> hex(pack_codes(codes_OI, 4)[0, 0, 0, 0])
    '0x75316420'
    >>> hex(pack_codes(codes_OI, 4, 8)[0, 0, 0, 0])
    '0x73625140'
    """
    inputs, parts = 32 // bits, 32 // part
    blocks = codes_OI.view(-1, VECTOR_SIZE, codes_OI.shape[1] // GROUP, GROUP // inputs, inputs)
    packed = torch.zeros(blocks.shape[:4], dtype=torch.int32)
    for number in range(inputs):
        place = number % parts * part + number // parts * bits
        packed |= blocks[..., number].to(torch.int32) << place
    return packed.permute(0, 2, 3, 1).contiguous()


def _pad(values_OX: Tensor) -> Tensor:
    """Fill the last blocks of outputs with zeros."""
    missing = -len(values_OX) % BLOCK
    return functional.pad(values_OX, [0, 0] * (values_OX.dim() - 1) + [0, missing]) if missing else values_OX
