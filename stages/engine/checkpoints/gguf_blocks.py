"""Reads the blocks of GGUF's quantised types as codes in groups of 32 or 16, without any rounding.

`GroupedMatrix.dequantise` of the result has the bits that the library `gguf` computes. Types whose codes are no
multiples of a step (IQ4_NL, MXFP4, ...) have no such form.

Shapes: O outputs, I inputs, B blocks, X bytes of a block, G groups of a block or of an output.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stages.engine.quantisation.groups import GroupedMatrix

Array = np.ndarray[Any, Any]
Groups = tuple[Array, Array, Array]  # codes (B, 32 G or 16 G), scales (B, G) and minima (B, G)


def read_groups(kind: str, rows: Array) -> GroupedMatrix | None:
    """Return the codes, scales and minima of a matrix in a type of GGUF, given the bytes of each output; None if the
    type has another form.
    """
    if kind not in _READERS or rows.ndim != 2:
        return None
    bits, size, read = _READERS[kind]
    codes, scales, minima = read(rows.reshape(-1, size))
    outputs = len(rows)
    return GroupedMatrix(
        torch.from_numpy(np.ascontiguousarray(codes).reshape(outputs, -1)),
        torch.from_numpy(np.ascontiguousarray(scales).reshape(outputs, -1)),
        torch.from_numpy(np.ascontiguousarray(minima).reshape(outputs, -1)),
        bits,
    )


def _read_half(blocks_BX: Array, start: int) -> Array:
    return np.ascontiguousarray(blocks_BX[:, start : start + 2]).view(np.float16).astype(np.float32)


def _read_fifth_bits(packed_BX: Array) -> Array:
    """Return 32 bits of 4 bytes, each as 0 or 16."""
    return np.unpackbits(packed_BX, axis=1, bitorder="little") << 4


def _read_q4_0(blocks_BX: Array) -> Groups:
    scale = _read_half(blocks_BX, 0)
    return _read_parts(blocks_BX[:, 2:], 4), scale, -8 * scale


def _read_q4_1(blocks_BX: Array) -> Groups:
    return _read_parts(blocks_BX[:, 4:], 4), _read_half(blocks_BX, 0), _read_half(blocks_BX, 2)


def _read_q5_0(blocks_BX: Array) -> Groups:
    scale = _read_half(blocks_BX, 0)
    return _read_parts(blocks_BX[:, 6:], 4) | _read_fifth_bits(blocks_BX[:, 2:6]), scale, -16 * scale


def _read_q5_1(blocks_BX: Array) -> Groups:
    codes = _read_parts(blocks_BX[:, 8:], 4) | _read_fifth_bits(blocks_BX[:, 4:8])
    return codes, _read_half(blocks_BX, 0), _read_half(blocks_BX, 2)


def _read_q8_0(blocks_BX: Array) -> Groups:
    scale = _read_half(blocks_BX, 0)
    return blocks_BX[:, 2:] ^ 128, scale, -128 * scale  # the sign bit of a two's complement: 128 is added


def _read_q4_k(blocks_BX: Array) -> Groups:
    return _read_k_bits(blocks_BX[:, 16:], 4), *_read_k_scales(blocks_BX)


def _read_q5_k(blocks_BX: Array) -> Groups:
    fifth = _read_parts(blocks_BX[:, 16:48], 1) << 4
    return _read_k_bits(blocks_BX[:, 48:], 4) | fifth, *_read_k_scales(blocks_BX)


def _read_q2_k(blocks_BX: Array) -> Groups:
    both = blocks_BX[:, :16]
    scales, minima = (part.astype(np.float32) for part in (both & 15, both >> 4))
    return _read_k_bits(blocks_BX[:, 16:80], 2), _read_half(blocks_BX, 80) * scales, -_read_half(blocks_BX, 82) * minima


def _read_q3_k(blocks_BX: Array) -> Groups:
    third = _read_parts(blocks_BX[:, :32], 1) << 2
    sixths = _read_parts(blocks_BX[:, 96:104], 4) | _read_parts(blocks_BX[:, 104:108], 2) << 4
    scales = _read_half(blocks_BX, 108) * (sixths.astype(np.float32) - 32)
    return _read_k_bits(blocks_BX[:, 32:96], 2) | third, scales, -4 * scales


def _read_q6_k(blocks_BX: Array) -> Groups:
    low = _read_parts(blocks_BX[:, :128].reshape(-1, 64), 4).reshape(len(blocks_BX), -1)
    scales = _read_half(blocks_BX, 208) * np.ascontiguousarray(blocks_BX[:, 192:208]).view(np.int8).astype(np.float32)
    return low | _read_k_bits(blocks_BX[:, 128:192], 2) << 4, scales, -32 * scales


def _read_k_bits(packed_BX: Array, bits: int) -> Array:
    """Return the codes of bytes: of every 32 bytes the lowest bits, then the next ones, and so on."""
    parts = packed_BX.reshape(-1, 32)
    return _read_parts(parts, bits).reshape(len(packed_BX), -1)


def _read_parts(packed_BX: Array, bits: int) -> Array:
    """Return the lowest bits of some bytes, then the next ones, and so on."""
    return np.concatenate([packed_BX >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], axis=1)


def _read_k_scales(blocks_BX: Array) -> tuple[Array, Array]:
    """Return the scales and minima of the eight groups of a block: six bits each, times a scale of the block."""
    from gguf.quants import Q4_K

    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks_BX[:, 4:16]))
    return _read_half(blocks_BX, 0) * scales.astype(np.float32), -_read_half(blocks_BX, 2) * minima.astype(np.float32)


# Per type its bits, the bytes of a block, and its reader.
_READERS: dict[str, tuple[int, int, Callable[[Array], Groups]]] = {
    "Q2_K": (2, 84, _read_q2_k),
    "Q3_K": (3, 110, _read_q3_k),
    "Q4_0": (4, 18, _read_q4_0),
    "Q4_1": (4, 20, _read_q4_1),
    "Q4_K": (4, 144, _read_q4_k),
    "Q5_0": (5, 22, _read_q5_0),
    "Q5_1": (5, 24, _read_q5_1),
    "Q5_K": (5, 176, _read_q5_k),
    "Q6_K": (6, 210, _read_q6_k),
    "Q8_0": (8, 34, _read_q8_0),
}
CODED_KINDS = frozenset(_READERS)
