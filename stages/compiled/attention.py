"""Attention of new tokens over the cache: one query and one head at a time.

The scores, their exponentials and the sums of values are computed key after key in the order of the text, whatever
other tokens a pass computes: a token has the same bits alone, in a batch and in a tree.

Shapes: N new tokens, H heads, K keys, E of a head.
"""

import math
from collections.abc import Callable

from llvmlite import ir

from stages.compiled.emitter import FLOAT, LONG, VECTOR, VECTOR_SIZE, WORK, Emitter, Value
from stages.compiled.shape import ModelShape
from stages.compiled.steps import KEY_FIELDS, Field, Header, KeyList
from stages.compiled.vector_math import exponential


def emit_attend(module: ir.Module, shape: ModelShape) -> None:
    """Define the function of attention; its items are the heads of all tokens."""
    emit = Emitter(module, "attend", WORK)
    _Attention(emit, shape).emit_heads()
    emit.finish()


class _Attention:
    """Emits the parts of attention."""

    def __init__(self, emit: Emitter, shape: ModelShape) -> None:
        self._emit, self._shape = emit, shape
        step, header, self._begin, self._end, thread = emit.arguments
        build = emit.builder
        self._queries, self._cache = emit.pointer(step, Field.INPUTS), emit.pointer(step, Field.CACHE)
        self._outputs = emit.pointer(step, Field.OUTPUTS)
        slides = build.icmp_signed("!=", emit.field(step, Field.SLIDES), emit.long(0))
        lists = (emit.pointer(header, Header.WINDOW_KEYS), emit.pointer(header, Header.KEYS))
        self._lists, self._branches = build.select(slides, *lists), emit.pointer(header, Header.BRANCHES)
        own = emit.multiply(thread, emit.field(header, Header.SCORES_SIZE))
        self._scores = emit.offset(emit.pointer(header, Header.SCORES), own, 4)
        self._highest = emit.variable(FLOAT, ir.Constant(FLOAT, -math.inf))
        self._total = emit.variable(VECTOR, emit.floats(0.0))
        vectors = shape.head_size // VECTOR_SIZE
        self._mixed = [emit.variable(VECTOR, emit.floats(0.0)) for _ in range(vectors)]

    def emit_heads(self) -> None:
        """Emit the loop over heads."""
        emit, shape = self._emit, self._shape
        with emit.loop(self._begin, self._end) as number:
            row, head = emit.divide(number, shape.heads), emit.remainder(number, shape.heads)
            keys = emit.offset(self._lists, emit.multiply(row, KEY_FIELDS), 8)
            group = emit.divide(head, shape.heads // shape.key_heads)
            begin = emit.offset(self._cache, emit.multiply(group, shape.head_size), 4)
            place = emit.add(emit.multiply(row, shape.joined), emit.multiply(head, shape.head_size))
            length = self._emit_scores(keys, begin, emit.offset(self._queries, place, 4))
            self._emit_exponentials(length)
            self._emit_values(keys, emit.offset(begin, shape.slot // 2, 4))
            target = emit.add(emit.multiply(row, shape.heads), head)
            self._store_mixed(emit.offset(self._outputs, emit.multiply(target, shape.head_size), 4))

    def _over_keys(self, keys: Value, begin: Value, visit: Callable[[Value, Value], None]) -> Value:
        """Emit what is done for every key, in the order of the text; returns how many there are.

        Args:
            keys: address of the list.
            begin: address of the numbers of the head in the first slot.
            visit: emits what is done, for the number of a key and the address of its numbers.
        """
        emit, slot = self._emit, self._shape.slot
        first, consecutive, branch, length = (emit.field(keys, field) for field in KeyList)
        with emit.loop(0, consecutive) as number:
            visit(number, emit.offset(begin, emit.multiply(emit.add(first, number), slot), 4))
        with emit.loop(0, length) as number:
            place = emit.load(emit.offset(self._branches, emit.add(branch, number), 8), LONG, 8)
            visit(emit.add(consecutive, number), emit.offset(begin, emit.multiply(place, slot), 4))
        return emit.add(consecutive, length)

    def _emit_scores(self, keys: Value, begin: Value, query: Value) -> Value:
        """Store the scaled products of the query with all keys, and remember the highest."""
        emit, build = self._emit, self._emit.builder
        scale = emit.floats(self._shape.head_size**-0.5)
        places = range(0, self._shape.head_size, VECTOR_SIZE)
        parts = [build.fmul(emit.load(emit.offset(query, place, 4), VECTOR), scale) for place in places]
        emit.set(self._highest, ir.Constant(FLOAT, -math.inf))

        def score(number: Value, key: Value) -> None:
            total = build.fmul(parts[0], emit.load(key, VECTOR))
            for place, part in zip(places[1:], parts[1:], strict=True):
                total = emit.multiply_add(part, emit.load(emit.offset(key, place, 4), VECTOR), total)
            value, highest = emit.total(total), emit.get(self._highest, FLOAT)
            emit.store(value, emit.offset(self._scores, number, 4))
            emit.set(self._highest, build.select(build.fcmp_ordered(">", value, highest), value, highest))

        return self._over_keys(keys, begin, score)

    def _emit_exponentials(self, length: Value) -> None:
        """Replace the scores by the exponentials of their distances from the highest, and sum them."""
        emit, build = self._emit, self._emit.builder
        emit.store(emit.floats(-math.inf), emit.offset(self._scores, length, 4))  # the rest of the last vector
        highest = emit.spread(emit.get(self._highest, FLOAT))
        emit.set(self._total, emit.floats(0.0))
        with emit.loop(0, length, VECTOR_SIZE) as number:
            address = emit.offset(self._scores, number, 4)
            value = exponential(emit, build.fsub(emit.load(address, VECTOR), highest))
            emit.store(value, address)
            emit.set(self._total, build.fadd(emit.get(self._total, VECTOR), value))

    def _emit_values(self, keys: Value, begin: Value) -> None:
        """Sum the values, each times its exponential."""
        emit = self._emit
        for mixed in self._mixed:
            emit.set(mixed, emit.floats(0.0))

        def add(number: Value, value: Value) -> None:
            share = emit.spread(emit.load(emit.offset(self._scores, number, 4), FLOAT))
            for vector, mixed in enumerate(self._mixed):
                own = emit.load(emit.offset(value, vector * VECTOR_SIZE, 4), VECTOR)
                emit.set(mixed, emit.multiply_add(share, own, emit.get(mixed, VECTOR)))

        self._over_keys(keys, begin, add)

    def _store_mixed(self, target: Value) -> None:
        """Divide by the sum of the exponentials."""
        emit = self._emit
        total = emit.spread(emit.total(emit.get(self._total, VECTOR)))
        for vector, mixed in enumerate(self._mixed):
            value = emit.builder.fdiv(emit.get(mixed, VECTOR), total)
            emit.store(value, emit.offset(target, vector * VECTOR_SIZE, 4))
