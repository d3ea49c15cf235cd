"""Codes of few bits as files of GGUF hold them, and how they are unpacked in registers.

A block of a file has one or two scales and, in words of 32 bits, the codes of 256 or 32 inputs of an output; scales of
groups within it are among the words. Packed, the blocks of `VECTOR_SIZE` outputs are transposed: the first words of
all, then the second ones, as large as the file. So a vector holds the same word of all outputs. A shift and a mask make
of it codes of four consecutive inputs, in a byte each.

The types are those of ggml, and two of matrices that are quantised here (`GROUPS4`, `GROUPS8`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from stages.engine.compiled.llvm.emitter import HALF, INTS, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.quantisation.groups import GROUP

WORD = 4  # bytes
VECTORS = GROUP // WORD  # of the codes of a group


@dataclass(frozen=True)
class Group:
    """The weights of a group of inputs, for `VECTOR_SIZE` outputs: `scale * (code - middle) + minimum`."""

    codes: Sequence[Value]  # `VECTORS` of them, each with the codes of four consecutive inputs, from 0, in bytes
    scales: Sequence[Value]  # float32; two where each half of a group has its own
    minima: Sequence[Value] = ()  # as many, or none


class Block:
    """Reads a packed block of `VECTOR_SIZE` outputs.

    Args:
        words: address of its words.
        scales: address of its scales.
        wide: whether scales have 32 bits and not 16.
    """

    def __init__(self, emit: Emitter, words: Value, scales: Value, *, wide: bool) -> None:
        self._emit, self._words, self._scales, self._wide = emit, words, scales, wide

    def words(self, first: int, count: int = VECTORS) -> list[Value]:
        size = WORD * VECTOR_SIZE
        addresses = [self._emit.offset(self._words, first + number, size) for number in range(count)]
        return [self._emit.load(address, INTS, 64) for address in addresses]

    def scale(self, number: int) -> Value:
        """Return a scale of the block in float32."""
        emit, size = self._emit, 4 if self._wide else 2
        address = emit.offset(self._scales, number * VECTOR_SIZE, size)
        if self._wide:
            return emit.load(address, VECTOR, 64)
        return emit.builder.fpext(emit.load(address, ir.VectorType(HALF, VECTOR_SIZE), 32), VECTOR)

    def take(self, words: Sequence[Value], bits: int, begin: int, to: int = 0) -> list[Value]:
        """Return some bits of every byte of words, moved to another place in it.

        Args:
            begin: their first bit.
            to: where it goes.
        """
        mask = self._emit.ints(((1 << bits) - 1 << to) * 0x01010101)
        return [self._emit.builder.and_(self._shift(word, begin - to), mask) for word in words]

    def join(self, low: Sequence[Value], high: Sequence[Value]) -> list[Value]:
        """Return the codes of which some words have the lower and others the higher bits."""
        return [self._emit.builder.or_(*parts) for parts in zip(low, high, strict=True)]

    def flip(self, words: Sequence[Value]) -> list[Value]:
        """Return signed bytes plus 128."""
        return [self._emit.builder.xor(word, self._emit.ints(0x80808080 - (1 << 32))) for word in words]

    def spread_bits(self, word: Value, first: int, to: int) -> Value:
        """Return four consecutive bits of a word, each at one place of a byte."""
        build, emit = self._emit.builder, self._emit
        few = build.and_(self._shift(word, first), emit.ints(15))
        apart = build.mul(few, emit.ints(1 | 1 << 7 | 1 << 14 | 1 << 21))
        return build.shl(build.and_(apart, emit.ints(0x01010101)), emit.ints(to))

    def number(self, word: Value, place: int, *, signed: bool = False, less: int = 0) -> Value:
        """Return a byte of a word, minus a number, in float32."""
        build, emit = self._emit.builder, self._emit
        if signed:
            raised = build.shl(word, emit.ints(24 - 8 * place)) if place < 3 else word
            return build.sitofp(build.ashr(raised, emit.ints(24)), VECTOR)
        value = build.and_(self._shift(word, 8 * place), emit.ints(255))
        return build.sitofp(build.sub(value, emit.ints(less)) if less else value, VECTOR)

    def multiply(self, left: Value, right: Value) -> Value:
        return self._emit.builder.fmul(left, right)

    def negate(self, value: Value) -> Value:
        return self._emit.builder.fneg(value)

    def _shift(self, word: Value, right: int) -> Value:
        build, emit = self._emit.builder, self._emit
        if not right:
            return word
        return build.lshr(word, emit.ints(right)) if right > 0 else build.shl(word, emit.ints(-right))


Unpack = Callable[[Block], Iterator[Group]]


def _unpack_four(minima: bool) -> Unpack:
    """Q4_0, Q4_1 and GROUPS4: 16 inputs in the low halves of bytes, then 16 in the high ones."""

    def unpack(block: Block) -> Iterator[Group]:
        words = block.words(0, 4)
        codes = block.take(words, 4, 0) + block.take(words, 4, 4)
        yield Group(codes, [block.scale(0)], [block.scale(1)] if minima else [])

    return unpack


def _unpack_five(minima: bool) -> Unpack:
    """Q5_0 and Q5_1: a word with the fifth bits of all codes, and then as Q4_0."""

    def unpack(block: Block) -> Iterator[Group]:
        (fifth,), words = block.words(0, 1), block.words(1, 4)
        low = block.take(words, 4, 0) + block.take(words, 4, 4)
        codes = block.join(low, [block.spread_bits(fifth, 4 * number, 4) for number in range(VECTORS)])
        yield Group(codes, [block.scale(0)], [block.scale(1)] if minima else [])

    return unpack


def _unpack_q8_0(block: Block) -> Iterator[Group]:
    yield Group(block.flip(block.words(0)), [block.scale(0)])


def _unpack_groups8(block: Block) -> Iterator[Group]:
    yield Group(block.words(0), [block.scale(0)], [block.scale(1)])


def _read_six_bits(block: Block) -> Iterator[tuple[Value, Value]]:
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


def _unpack_q4_k(block: Block) -> Iterator[Group]:
    for number, (scale, minimum) in enumerate(_read_six_bits(block)):
        pair, half = divmod(number, 2)
        yield Group(block.take(block.words(3 + VECTORS * pair), 4, 4 * half), [scale], [minimum])


def _unpack_q5_k(block: Block) -> Iterator[Group]:
    for number, (scale, minimum) in enumerate(_read_six_bits(block)):
        pair, half = divmod(number, 2)
        low = block.take(block.words(11 + VECTORS * pair), 4, 4 * half)
        yield Group(block.join(low, block.take(block.words(3), 1, number, 4)), [scale], [minimum])


def _unpack_q6_k(block: Block) -> Iterator[Group]:
    scale, numbers = block.scale(0), block.words(48, 4)
    for number in range(8):
        half, part = divmod(number, 4)
        low = block.take(block.words(16 * half + VECTORS * (part % 2)), 4, part // 2 * 4)
        high = block.take(block.words(32 + VECTORS * half), 2, 2 * part, 4)
        places = [divmod(2 * number + side, 4) for side in range(2)]
        scales = [block.multiply(scale, block.number(numbers[word], place, signed=True)) for word, place in places]
        yield Group(block.join(low, high), scales)


def _unpack_q2_k(block: Block) -> Iterator[Group]:
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


def _unpack_q3_k(block: Block) -> Iterator[Group]:
    words, scale = block.words(24, 3), block.scale(0)
    low = block.take(words[:2], 4, 0) + block.take(words[:2], 4, 4)
    sixths = block.join(low, [block.take(words[2:], 2, 2 * number, 4)[0] for number in range(4)])
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

    bits: int  # of a code
    groups: int  # of a block
    size: int  # bytes of a block in a file
    first: int  # byte of the first word
    words: int
    scales: tuple[int, ...]  # bytes of the block's scales
    unpack: Unpack
    middle: int = 0  # the code of 0, subtracted from all
    halves: bool = False  # whether each half of a group has a scale of its own
    wide: bool = False  # whether scales have 32 bits and not 16

    @property
    def parts(self) -> int:
        """How many parts of a group have a scale each: 1, or 2."""
        return 2 if self.halves else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a block and output."""
        return len(self.scales) * (4 if self.wide else 2)


CODE_TYPES = {
    "Q2_K": CodeType(2, 8, 84, 0, 20, (80, 82), _unpack_q2_k, halves=True),
    "Q3_K": CodeType(3, 8, 110, 0, 27, (108,), _unpack_q3_k, 4, halves=True),
    "Q4_0": CodeType(4, 1, 18, 2, 4, (0,), _unpack_four(minima=False), 8),
    "Q4_1": CodeType(4, 1, 20, 4, 4, (0, 2), _unpack_four(minima=True)),
    "Q4_K": CodeType(4, 8, 144, 4, 35, (0, 2), _unpack_q4_k),
    "Q5_0": CodeType(5, 1, 22, 2, 5, (0,), _unpack_five(minima=False), 16),
    "Q5_1": CodeType(5, 1, 24, 4, 5, (0, 2), _unpack_five(minima=True)),
    "Q5_K": CodeType(5, 8, 176, 4, 43, (0, 2), _unpack_q5_k),
    "Q6_K": CodeType(6, 8, 210, 0, 52, (208,), _unpack_q6_k, 32, halves=True),
    "Q8_0": CodeType(8, 1, 34, 2, 8, (0,), _unpack_q8_0, 128),
    "GROUPS4": CodeType(4, 1, 24, 8, 4, (0, 4), _unpack_four(minima=True), wide=True),
    "GROUPS8": CodeType(8, 1, 40, 8, 8, (0, 4), _unpack_groups8, wide=True),
}
