"""Codes of few bits as files of GGUF hold them: where each type has its codes and scales, for all that reads them.

A block of a file has one or two scales and, in words of 32 bits, the codes of 256 or 32 inputs of an output; scales of
groups within it are among the words. A shift and a mask make of a word the codes of four consecutive inputs, in a byte
each. Codes that are no multiples of a step (IQ4_NL, IQ4_XS, MXFP4) are places in a table of 16 numbers.

The types are those of ggml, and two of matrices that are quantised here (`GROUPS4`, `GROUPS8`). Their layout is stated
once, as operations on words: `ArrayBlocks` reads many blocks with numpy, and `stages/engine/compiled/codes.py` emits
what unpacks them in registers.

Shapes: O outputs, B blocks, X bytes of a block or of an output, W words.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.engine.quantisation.groups import GROUP, GroupedMatrix

Array = np.ndarray[Any, Any]
WORD = 4  # bytes
VECTORS = GROUP // WORD  # of the codes of a group


@dataclass(frozen=True)
class Group:
    """The weights of a group of inputs: `scale * (code - middle) + minimum`. Values are of the block that is read."""

    codes: Sequence[Any]  # `VECTORS` of them, each with the codes of four consecutive inputs, from 0, in bytes
    scales: Sequence[Any]  # float32; two where each half of a group has its own
    minima: Sequence[Any] = ()  # as many, or none


Unpack = Callable[[Any], Iterator[Group]]  # of an object with the methods of `ArrayBlocks`
# Numbers of the codes of IQ4, plus 128, and of MXFP4, in halves and plus 16.
IQ4 = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
MXFP4 = (16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4)


def _split_bytes(block: Any, words: Sequence[Any]) -> list[Any]:
    """Return the codes of a group with 16 inputs in the low halves of bytes, then 16 in the high ones."""
    return [*block.take(words, 4, 0), *block.take(words, 4, 4)]


def _unpack_four(minima: bool = False, table: Sequence[int] = ()) -> Unpack:
    """Q4_0, Q4_1, GROUPS4, and with a table IQ4_NL and MXFP4."""

    def unpack(block: Any) -> Iterator[Group]:
        codes = _split_bytes(block, block.words(0, 4))
        codes = block.look_up(codes, table) if table else codes
        yield Group(codes, [block.scale(0)], [block.scale(1)] if minima else [])

    return unpack


def _unpack_iq4_xs(block: Any) -> Iterator[Group]:
    (low,), high, scale = block.words(0, 1), block.short(1), block.scale(0)
    for number in range(8):
        (four,), (two,) = block.take([low], 4, 4 * (number % 2)), block.take([high], 2, 2 * (number % 4), 4)
        parts = block.number(four, number // 2), block.number(two, number // 4, less=32)
        codes = block.look_up(_split_bytes(block, block.words(1 + 4 * number, 4)), IQ4)
        yield Group(codes, [block.multiply(scale, block.add(*parts))])


def _unpack_five(minima: bool) -> Unpack:
    """Q5_0 and Q5_1: a word with the fifth bits of all codes, and then as Q4_0."""

    def unpack(block: Any) -> Iterator[Group]:
        (fifth,), low = block.words(0, 1), _split_bytes(block, block.words(1, 4))
        codes = block.join(low, [block.spread_bits(fifth, 4 * number, 4) for number in range(VECTORS)])
        yield Group(codes, [block.scale(0)], [block.scale(1)] if minima else [])

    return unpack


def _unpack_q8_0(block: Any) -> Iterator[Group]:
    yield Group(block.flip(block.words(0)), [block.scale(0)])


def _unpack_groups8(block: Any) -> Iterator[Group]:
    yield Group(block.words(0), [block.scale(0)], [block.scale(1)])


def _read_six_bits(block: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the scale and the minimum of every group of Q4_K and Q5_K."""
    words, scale, minimum = block.words(0, 3), block.scale(0), block.negate(block.scale(1))
    high = block.take(words[:2], 2, 6, 4)
    last = block.join([block.take(words[2:], 4, begin)[0] for begin in (0, 4)], high)
    scales, minima = zip(block.take(words[:2], 6, 0), last, strict=True)
    for number in range(8):
        half, place = divmod(number, 4)
        yield (
            block.multiply(scale, block.number(scales[half], place)),
            block.multiply(minimum, block.number(minima[half], place)),
        )


def _unpack_q4_k(block: Any) -> Iterator[Group]:
    for number, (scale, minimum) in enumerate(_read_six_bits(block)):
        pair, half = divmod(number, 2)
        yield Group(block.take(block.words(3 + VECTORS * pair), 4, 4 * half), [scale], [minimum])


def _unpack_q5_k(block: Any) -> Iterator[Group]:
    for number, (scale, minimum) in enumerate(_read_six_bits(block)):
        pair, half = divmod(number, 2)
        low = block.take(block.words(11 + VECTORS * pair), 4, 4 * half)
        yield Group(block.join(low, block.take(block.words(3), 1, number, 4)), [scale], [minimum])


def _unpack_q6_k(block: Any) -> Iterator[Group]:
    scale, numbers = block.scale(0), block.words(48, 4)
    for number in range(8):
        half, part = divmod(number, 4)
        low = block.take(block.words(16 * half + VECTORS * (part % 2)), 4, part // 2 * 4)
        high = block.take(block.words(32 + VECTORS * half), 2, 2 * part, 4)
        places = [divmod(2 * number + side, 4) for side in range(2)]
        scales = [block.multiply(scale, block.number(numbers[word], place, signed=True)) for word, place in places]
        yield Group(block.join(low, high), scales)


def _unpack_q2_k(block: Any) -> Iterator[Group]:
    both, scale, minimum = block.words(0, 4), block.scale(0), block.negate(block.scale(1))
    scales, minima = block.take(both, 4, 0), block.take(both, 4, 4)
    for number in range(8):
        half, part = divmod(number, 4)
        places = [divmod(2 * number + side, 4) for side in range(2)]
        yield Group(
            block.take(block.words(4 + VECTORS * half), 2, 2 * part),
            [block.multiply(scale, block.number(scales[word], place)) for word, place in places],
            [block.multiply(minimum, block.number(minima[word], place)) for word, place in places],
        )


def _unpack_q3_k(block: Any) -> Iterator[Group]:
    words, scale = block.words(24, 3), block.scale(0)
    high = [block.take(words[2:], 2, 2 * number, 4)[0] for number in range(4)]
    sixths = block.join(_split_bytes(block, words[:2]), high)
    for number in range(8):
        half, part = divmod(number, 4)
        codes = block.take(block.words(8 + VECTORS * half), 2, 2 * part)
        codes = block.join(codes, block.take(block.words(0), 1, number, 2))
        places = [divmod(2 * number + side, 4) for side in range(2)]
        scales = [block.multiply(scale, block.number(sixths[word], place, less=32)) for word, place in places]
        yield Group(codes, scales)


@dataclass(frozen=True)
class CodeType:
    """A type of codes."""

    bits: int  # of a code in a file
    groups: int  # of a block
    size: int  # bytes of a block in a file
    first: int  # byte of the first word
    words: int
    scales: tuple[int, ...]  # bytes of the block's scales
    unpack: Unpack
    middle: int = 0  # the code of 0, subtracted from all
    halves: bool = False  # whether each half of a group has a scale of its own
    scale_size: int = 2  # bytes of a scale

    @property
    def parts(self) -> int:
        """How many parts of a group have a scale each: 1, or 2."""
        return 2 if self.halves else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a block and output."""
        return len(self.scales) * self.scale_size


CODE_TYPES = {
    "Q2_K": CodeType(2, 8, 84, 0, 20, (80, 82), _unpack_q2_k, halves=True),
    "Q3_K": CodeType(3, 8, 110, 0, 27, (108,), _unpack_q3_k, 4, halves=True),
    "Q4_0": CodeType(4, 1, 18, 2, 4, (0,), _unpack_four(), 8),
    "Q4_1": CodeType(4, 1, 20, 4, 4, (0, 2), _unpack_four(minima=True)),
    "Q4_K": CodeType(4, 8, 144, 4, 35, (0, 2), _unpack_q4_k),
    "Q5_0": CodeType(5, 1, 22, 2, 5, (0,), _unpack_five(minima=False), 16),
    "Q5_1": CodeType(5, 1, 24, 4, 5, (0, 2), _unpack_five(minima=True)),
    "Q5_K": CodeType(5, 8, 176, 4, 43, (0, 2), _unpack_q5_k),
    "Q6_K": CodeType(6, 8, 210, 0, 52, (208,), _unpack_q6_k, 32, halves=True),
    "Q8_0": CodeType(8, 1, 34, 2, 8, (0,), _unpack_q8_0, 128),
    "IQ4_NL": CodeType(4, 1, 18, 2, 4, (0,), _unpack_four(table=IQ4), 128),
    "IQ4_XS": CodeType(4, 8, 136, 4, 33, (0, 2), _unpack_iq4_xs, 128),
    "MXFP4": CodeType(4, 1, 17, 1, 4, (0,), _unpack_four(table=MXFP4), 16, scale_size=1),
    "GROUPS4": CodeType(4, 1, 24, 8, 4, (0, 4), _unpack_four(minima=True), scale_size=4),
    "GROUPS8": CodeType(8, 1, 40, 8, 8, (0, 4), _unpack_groups8, scale_size=4),
}


class ArrayBlocks:
    """Reads blocks of one type, many at once: a word is an array of as many numbers."""

    def __init__(self, kind: CodeType, blocks_BX: Array) -> None:
        self._kind, self._blocks_BX = kind, blocks_BX
        words_BX = blocks_BX[:, kind.first : kind.first + WORD * kind.words]
        self._words_WB = np.ascontiguousarray(words_BX.view("<u4").T)

    def words(self, first: int, count: int = VECTORS) -> Array:
        return self._words_WB[first : first + count]

    def scale(self, number: int) -> Array:
        """Return a scale of the block in float32; one of 8 bits is 128 plus the exponent of a power of 2."""
        if self._kind.scale_size == 1:
            return np.ldexp(np.float32(1), self._read_scale(number, "u").astype(np.int32) - 128)
        return self._read_scale(number, "f").astype(np.float32)

    def short(self, number: int) -> Array:
        """Return the 16 bits in the place of a scale as the lower ones of a word."""
        return self._read_scale(number, "u").astype(np.uint32)

    def _read_scale(self, number: int, form: str) -> Array:
        start, size = self._kind.scales[number], self._kind.scale_size
        return np.ascontiguousarray(self._blocks_BX[:, start : start + size]).view(f"<{form}{size}")[:, 0]

    def look_up(self, codes: Sequence[Array], table: Sequence[int]) -> Array:
        """Return the byte of a table of 16 for every byte of words, which are below 16."""
        return np.array(table, np.uint8)[np.stack(codes).view(np.uint8)].view("<u4")

    def take(self, words: Sequence[Array], bits: int, begin: int, to: int = 0) -> Array:
        """Return some bits of every byte of words, of which `begin` is the first, moved to begin at `to`."""
        moved = np.asarray(words)
        if begin != to:
            moved = moved >> begin - to if begin > to else moved << to - begin
        return moved & np.uint32(((1 << bits) - 1 << to) * 0x01010101)

    def join(self, low: Sequence[Array], high: Sequence[Array]) -> Array:
        """Return the codes of which some words have the lower and others the higher bits."""
        return np.bitwise_or(low, high)

    def flip(self, words: Array) -> Array:
        """Return signed bytes plus 128."""
        return words ^ np.uint32(0x80808080)

    def spread_bits(self, word: Array, first: int, to: int) -> Array:
        """Return four consecutive bits of a word, each at one place of a byte."""
        apart = (word >> first & np.uint32(15)) * np.uint32(1 | 1 << 7 | 1 << 14 | 1 << 21)
        return (apart & np.uint32(0x01010101)) << to

    def number(self, word: Array, place: int, *, signed: bool = False, less: int = 0) -> Array:
        """Return a byte of a word, minus a number, in float32."""
        byte = (word >> 8 * place).astype(np.uint8)
        return (byte.view(np.int8) if signed else byte).astype(np.float32) - np.float32(less)

    def multiply(self, left: Array, right: Array) -> Array:
        return left * right

    def add(self, left: Array, right: Array) -> Array:
        return left + right

    def negate(self, value: Array) -> Array:
        return -value


def read_groups(kind: str, rows_OX: Array) -> GroupedMatrix:
    """Return the codes, scales and minima of a matrix in one of `CODE_TYPES`, given the bytes of each output.

    `GroupedMatrix.dequantise` of them has the bits that the library `gguf` computes.
    """
    layout = CODE_TYPES[kind]
    groups = list(layout.unpack(ArrayBlocks(layout, rows_OX.reshape(-1, layout.size))))

    def join(parts: list[Sequence[Array]]) -> torch.Tensor:
        """Return numbers of groups, given as arrays of all blocks, by output."""
        return torch.from_numpy(np.ascontiguousarray(np.concatenate(parts).T)).view(len(rows_OX), -1)

    scales_OG = join([group.scales for group in groups])
    own = groups[0].minima
    minima_OG = join([group.minima for group in groups]) if own else -layout.middle * scales_OG
    codes_OI = join([group.codes for group in groups]).view(torch.uint8)
    return GroupedMatrix(codes_OI, scales_OG, minima_OG, max(layout.bits, layout.middle.bit_length()))


FILE_KINDS = frozenset(kind for kind, layout in CODE_TYPES.items() if layout.scale_size < 4)  # types of ggml
