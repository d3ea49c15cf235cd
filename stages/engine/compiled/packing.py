"""Matrices in the layout that compiled products read (`stages/engine/compiled/products.py`).

Shapes: O outputs, I inputs, G groups of inputs, X bytes of an output, B blocks of outputs, L outputs of a block.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stages.engine.compiled.llvm.emitter import VECTOR_SIZE
from stages.engine.compiled.packed_memory import PackedMemory
from stages.engine.compiled.products import ProductKind
from stages.engine.forward_pass.kernels import Matrix, join_matrices
from stages.engine.quantisation.groups import GROUP
from stages.engine.quantisation.layouts import CODE_TYPES, WORD, Array, CodeType
from stages.engine.quantisation.stored import Bytes, Codes, StoredMatrix, release_pages

PART_BYTES = 4 << 20  # of a file that a thread packs at a time, and then gives back
ROWS_AT_ONCE = 1024  # whose numbers are compared with those of fewer bits
NO_SCALES = torch.empty(0)
NUMBERS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in blocks of outputs."""

    kind: ProductKind  # how it is stored
    outputs: int  # number of outputs, without the padding of the last block
    groups: int
    data: Tensor  # words with its codes, or its numbers
    scales: Tensor  # of blocks of inputs; empty without any
    bias_O: Tensor | None  # float32, padded; None without one

    @property
    def blocks(self) -> int:
        """Number of blocks of outputs."""
        return -(-self.outputs // VECTOR_SIZE)

    @property
    def padded(self) -> int:
        return self.blocks * VECTOR_SIZE


def can_pack_inputs(inputs: int) -> bool:
    """Whether a matrix with that many inputs can be packed: they must divide into groups."""
    return inputs > 0 and inputs % GROUP == 0


def pack_matrices(
    parts: Sequence[Matrix], memory: PackedMemory, *, input_bits: int, rounds: bool = False
) -> list[PackedMatrix]:
    """Pack matrices of the same inputs, whose outputs follow each other: as one where they are stored alike. Codes take
    their part of the memory. `rounds`: whether numbers of 32 bits are rounded to float16, if they are in its range.
    """
    forms = [None if part.codes is None else _name_form(part.codes) for part in parts]
    alike = len({form in NUMBERS for form in forms}) == 1  # numbers read other inputs than codes
    if None in forms or not alike or not _fill_blocks([part.weight_OI.shape[0] for part in parts], forms):
        numbers = join_matrices([part.without_codes() for part in parts])
        return [pack_matrix(numbers, memory, input_bits=input_bits, rounds=rounds)]
    packed = []
    for _, run in groupby(zip(parts, forms, strict=True), key=itemgetter(1)):
        own = [part for part, _ in run]
        biases = [part.bias_O for part in own if part.bias_O is not None]
        codes = [part.codes for part in own if part.codes is not None]
        packed.append(_pack_codes(codes, torch.cat(biases) if biases else None, memory, input_bits))
    return packed


def _fill_blocks(outputs: Sequence[int], forms: Sequence[str | None]) -> bool:
    """Check whether the outputs of what is packed as one fill the blocks before others follow."""
    ends = [place for place in range(1, len(forms)) if forms[place] != forms[place - 1]]
    return all(sum(outputs[:end]) % VECTOR_SIZE == 0 for end in ends)


def pack_matrix(matrix: Matrix, memory: PackedMemory, *, input_bits: int, rounds: bool = False) -> PackedMatrix:
    """Pack a matrix: its codes if it has any; else its numbers, in 16 bits if those keep them. Its number of inputs is
    one of which `can_pack_inputs` is true. Inputs have 32 bits, or `input_bits` that they are rounded to; numbers that
    are no codes are multiplied unrounded.
    """
    if matrix.codes is not None:
        return _pack_codes([matrix.codes], matrix.bias_O, memory, input_bits)
    weight_OI = matrix.weight_OI
    outputs, inputs = weight_OI.shape
    form = find_number_type(weight_OI)
    if rounds and form == "F32" and weight_OI.abs().max() <= torch.finfo(torch.float16).max:
        form = "F16"
    data = torch.zeros(-(-outputs // VECTOR_SIZE), inputs, VECTOR_SIZE, dtype=NUMBERS[form])
    whole = outputs - outputs % VECTOR_SIZE
    data[: whole // VECTOR_SIZE] = weight_OI[:whole].view(-1, VECTOR_SIZE, inputs).transpose(1, 2)
    if whole < outputs:
        data[whole // VECTOR_SIZE, :, : outputs - whole] = weight_OI[whole:].T
    return PackedMatrix(ProductKind(form), outputs, inputs // GROUP, data, NO_SCALES, _pad_bias(matrix.bias_O))


def find_number_type(weight_OI: Tensor) -> str:
    """Return the first of `NUMBERS` that keeps every number of a matrix."""
    parts = weight_OI.split(ROWS_AT_ONCE)
    for name, kind in NUMBERS.items():
        if all(torch.equal(part.to(kind).to(part.dtype), part) for part in parts):
            return name
    return "F32"  # of NaN, which is equal to nothing


def _name_form(codes: Codes) -> str:
    if isinstance(codes, StoredMatrix):
        return codes.kind
    return "GROUPS4" if codes.bits == 4 else "GROUPS8"


def _read_rows(codes: Codes) -> Bytes:
    """Return the blocks of all outputs: those of the file, or such as a file would hold of what was quantised here."""
    if isinstance(codes, StoredMatrix):
        if codes.order_O is None:
            return codes.rows_OX
        rows_OX: Bytes = codes.rows_OX[codes.order_O.numpy()]
        codes.release()
        return rows_OX
    codes_OGX = codes.codes_OI.unflatten(1, (-1, GROUP))
    if codes.bits == 4:
        low_OGX, high_OGX = codes_OGX.unflatten(2, (2, -1)).unbind(2)
        codes_OGX = low_OGX | high_OGX << 4
    scales_OGX = torch.stack([codes.scale_OG, codes.minimum_OG], dim=2).view(torch.uint8)
    return np.asarray(torch.cat([scales_OGX, codes_OGX], dim=2).flatten(1))


def _pack_codes(parts: Sequence[Codes], bias_O: Tensor | None, memory: PackedMemory, input_bits: int) -> PackedMatrix:
    """Pack the codes of matrices of one type as one, or their numbers of 16 bits; where the memory is filled, they are
    there.
    """
    form, inputs = _name_form(parts[0]), parts[0].shape[1]
    outputs = sum(part.shape[0] for part in parts)
    padded = -(-outputs // VECTOR_SIZE) * VECTOR_SIZE
    if form not in CODE_TYPES:
        numbers_BIL = memory.reserve((padded // VECTOR_SIZE, inputs, VECTOR_SIZE), np.dtype(np.int16))
        if not memory.filled:
            _write_numbers([_read_rows(part) for part in parts], numbers_BIL)
        data = torch.from_numpy(numbers_BIL)
        return PackedMatrix(ProductKind(form), outputs, inputs // GROUP, data, NO_SCALES, _pad_bias(bias_O))
    kind, codes = ProductKind(form, input_bits), CODE_TYPES[form]
    blocks = inputs // (GROUP * codes.groups)
    number = np.dtype(f"i{codes.scale_size}")
    words_BGXL = memory.reserve((padded // VECTOR_SIZE, blocks, codes.words, VECTOR_SIZE), np.dtype(np.int32))
    scales_BGXL = memory.reserve((padded // VECTOR_SIZE, blocks, len(codes.scales), VECTOR_SIZE), number)
    if not memory.filled:
        _write_codes(codes, [_read_rows(part) for part in parts], words_BGXL, scales_BGXL)
    data, scales = torch.from_numpy(words_BGXL), torch.from_numpy(scales_BGXL)
    return PackedMatrix(kind, outputs, blocks * codes.groups, data, scales, _pad_bias(bias_O))


def _write_codes(codes: CodeType, parts: Sequence[Bytes], words_BGXL: Array, scales_BGXL: Array) -> None:
    """Write the blocks of all outputs of matrices."""

    def write(begin: int, rows: Bytes) -> None:
        blocks_BLGX = rows.reshape(-1, VECTOR_SIZE, words_BGXL.shape[1], codes.size)
        end = begin + len(blocks_BLGX)
        words_BLGX = blocks_BLGX[..., codes.first : codes.first + codes.words * WORD].view(np.int32)
        words_BGXL[begin:end] = words_BLGX.transpose(0, 2, 3, 1)
        for place, first in enumerate(codes.scales):
            scales_BLG = blocks_BLGX[..., first : first + codes.scale_size].view(scales_BGXL.dtype)[..., 0]
            scales_BGXL[begin:end, :, place] = scales_BLG.transpose(0, 2, 1)

    _write_blocks(parts, len(words_BGXL), write)


def _write_numbers(parts: Sequence[Bytes], numbers_BIL: Array) -> None:
    """Write the numbers of all outputs of matrices."""

    def write(begin: int, rows: Bytes) -> None:
        numbers_BLI = rows.view(numbers_BIL.dtype).reshape(-1, VECTOR_SIZE, numbers_BIL.shape[1])
        numbers_BIL[begin : begin + len(numbers_BLI)] = numbers_BLI.transpose(0, 2, 1)

    _write_blocks(parts, len(numbers_BIL), write)


def _write_blocks(parts: Sequence[Bytes], blocks: int, write: Callable[[int, Bytes], None]) -> None:
    """Write the rows of matrices on all threads: `write` is given the first block and its rows of some. What is missing
    to whole blocks is zeros.
    """
    missing = blocks * VECTOR_SIZE - sum(map(len, parts))
    if missing or any(len(part) % VECTOR_SIZE for part in parts):
        parts = [np.concatenate([*parts, np.zeros((missing, parts[0].shape[1]), np.uint8)])]
    begin, slices = 0, []
    step = max(1, PART_BYTES // parts[0].shape[1] // VECTOR_SIZE) * VECTOR_SIZE
    for part in parts:
        slices += [(begin + start // VECTOR_SIZE, part[start : start + step]) for start in range(0, len(part), step)]
        begin += len(part) // VECTOR_SIZE

    def write_and_release(begin: int, rows: Bytes) -> None:
        write(begin, rows)
        release_pages(rows)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(write_and_release, *zip(*slices, strict=True)))


def _pad_bias(bias_O: Tensor | None) -> Tensor | None:
    if bias_O is None:
        return None
    return functional.pad(bias_O.float(), [0, -len(bias_O) % VECTOR_SIZE]).contiguous()
