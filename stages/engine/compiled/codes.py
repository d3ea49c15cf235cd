"""How codes of few bits are unpacked in registers (`stages/engine/quantisation/layouts.py` has the types).

Packed, the blocks of `VECTOR_SIZE` outputs are transposed: the first words of all, then the second ones, as large as
the file. So a vector holds the same word of all outputs.
"""

from collections.abc import Sequence

from llvmlite import ir

from stages.engine.compiled.llvm.emitter import HALF, INTS, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.quantisation.layouts import VECTORS, WORD


class Block:
    """Reads a packed block of `VECTOR_SIZE` outputs, with the methods of `ArrayBlocks`. Words and scales are addresses;
    `wide` scales have 32 bits and not 16.
    """

    def __init__(self, emit: Emitter, words: Value, scales: Value, *, wide: bool) -> None:
        self._emit, self._words, self._scales, self._wide = emit, words, scales, wide

    def words(self, first: int, count: int = VECTORS) -> list[Value]:
        size = WORD * VECTOR_SIZE
        addresses = [self._emit.offset(self._words, first + number, size) for number in range(count)]
        return [self._emit.load(address, INTS, 64) for address in addresses]

    def scale(self, number: int) -> Value:
        emit, size = self._emit, 4 if self._wide else 2
        address = emit.offset(self._scales, number * VECTOR_SIZE, size)
        if self._wide:
            return emit.load(address, VECTOR, 64)
        return emit.builder.fpext(emit.load(address, ir.VectorType(HALF, VECTOR_SIZE), 32), VECTOR)

    def take(self, words: Sequence[Value], bits: int, begin: int, to: int = 0) -> list[Value]:
        mask = self._emit.ints(((1 << bits) - 1 << to) * 0x01010101)
        return [self._emit.builder.and_(self._shift(word, begin - to), mask) for word in words]

    def join(self, low: Sequence[Value], high: Sequence[Value]) -> list[Value]:
        return [self._emit.builder.or_(*parts) for parts in zip(low, high, strict=True)]

    def flip(self, words: Sequence[Value]) -> list[Value]:
        return [self._emit.builder.xor(word, self._emit.ints(0x80808080 - (1 << 32))) for word in words]

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

    def negate(self, value: Value) -> Value:
        return self._emit.builder.fneg(value)

    def _shift(self, word: Value, right: int) -> Value:
        build, emit = self._emit.builder, self._emit
        if not right:
            return word
        return build.lshr(word, emit.ints(right)) if right > 0 else build.shl(word, emit.ints(-right))
