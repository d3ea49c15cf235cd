"""How codes of few bits are unpacked in registers (`stages/engine/quantisation/layouts.py` has the types).

Packed, the blocks of `VECTOR_SIZE` outputs are transposed: the first words of all, then the second ones, as large as
the file. So a vector holds the same word of all outputs.
"""

from collections.abc import Sequence

from llvmlite import ir

from stages.engine.compiled.llvm.emitter import BYTE, FLOAT, HALF, INTS, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.compiled.llvm.machine import Features
from stages.engine.quantisation.layouts import VECTORS, WORD

FLIP = 0x80808080 - (1 << 32)  # of a word: its bytes plus or minus 128


class Block:
    """Reads a packed block of `VECTOR_SIZE` outputs, with the methods of `ArrayBlocks`. Words and scales are addresses;
    a scale has so many bytes.
    """

    def __init__(self, emit: Emitter, words: Value, scales: Value, scale_size: int, features: Features) -> None:
        self._emit, self._words, self._scales, self._scale_size = emit, words, scales, scale_size
        self._features = features

    def words(self, first: int, count: int = VECTORS) -> list[Value]:
        size = WORD * VECTOR_SIZE
        addresses = [self._emit.offset(self._words, first + number, size) for number in range(count)]
        return [self._emit.load(address, INTS, 64) for address in addresses]

    def scale(self, number: int) -> Value:
        build, emit = self._emit.builder, self._emit
        if self._scale_size == 4:
            return self._load_scales(number, FLOAT)
        if self._scale_size == 2:
            return build.fpext(self._load_scales(number, HALF), VECTOR)
        power = build.zext(self._load_scales(number, BYTE), INTS)
        bits = build.shl(build.sub(power, emit.ints(1)), emit.ints(23))
        tiny = build.shl(emit.ints(1 << 21), power)  # below the numbers with a first bit of 1
        return build.bitcast(build.select(build.icmp_unsigned("<", power, emit.ints(2)), tiny, bits), VECTOR)

    def short(self, number: int) -> Value:
        return self._emit.builder.zext(self._load_scales(number, ir.IntType(16)), INTS)

    def _load_scales(self, number: int, kind: ir.Type) -> Value:
        address = self._emit.offset(self._scales, number * VECTOR_SIZE, self._scale_size)
        return self._emit.load(address, ir.VectorType(kind, VECTOR_SIZE), VECTOR_SIZE * self._scale_size)

    def look_up(self, codes: Sequence[Value], table: Sequence[int]) -> list[Value]:
        return [self._features.look_up(self._emit, word, table) for word in codes]

    def take(self, words: Sequence[Value], bits: int, begin: int, to: int = 0) -> list[Value]:
        mask = self._emit.ints(((1 << bits) - 1 << to) * 0x01010101)
        return [self._emit.builder.and_(self._shift(word, begin - to), mask) for word in words]

    def join(self, low: Sequence[Value], high: Sequence[Value]) -> list[Value]:
        return [self._emit.builder.or_(*parts) for parts in zip(low, high, strict=True)]

    def flip(self, words: Sequence[Value]) -> list[Value]:
        return [self._emit.builder.xor(word, self._emit.ints(FLIP)) for word in words]

    def spread_bits(self, word: Value, first: int, to: int) -> Value:
        build, emit = self._emit.builder, self._emit
        few = build.and_(self._shift(word, first), emit.ints(15))
        apart = build.mul(few, emit.ints(1 | 1 << 7 | 1 << 14 | 1 << 21))
        return build.shl(build.and_(apart, emit.ints(0x01010101)), emit.ints(to))

    def number(self, word: Value, place: int, *, signed: bool = False, less: int = 0) -> Value:
        build, emit = self._emit.builder, self._emit
        if signed:
            raised = build.shl(word, emit.ints(24 - 8 * place)) if place < 3 else word
            return build.sitofp(build.ashr(raised, emit.ints(24)), VECTOR)
        value = build.and_(self._shift(word, 8 * place), emit.ints(255))
        return build.sitofp(build.sub(value, emit.ints(less)) if less else value, VECTOR)

    def multiply(self, left: Value, right: Value) -> Value:
        return self._emit.builder.fmul(left, right)

    def add(self, left: Value, right: Value) -> Value:
        return self._emit.builder.fadd(left, right)

    def negate(self, value: Value) -> Value:
        return self._emit.builder.fneg(value)

    def _shift(self, word: Value, right: int) -> Value:
        build, emit = self._emit.builder, self._emit
        if not right:
            return word
        return build.lshr(word, emit.ints(right)) if right > 0 else build.shl(word, emit.ints(-right))
