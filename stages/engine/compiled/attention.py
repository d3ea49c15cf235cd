"""Attention of new tokens over the cache, one query at a time.

The scores, their exponentials and the sums of values are computed key after key in the order of the text, whatever
other tokens a pass computes: a token has the same bits alone, in a batch and in a tree. Heads that share keys and
values take them in turn, some keys at a time, so that these are read from memory once.

Shapes: N new tokens, H heads, G key heads, K keys, E of a head.
"""

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from stages.engine.compiled.llvm.emitter import FLOAT, INT, INTS, LONG, VECTOR, VECTOR_SIZE, WORK, Emitter, Value
from stages.engine.compiled.llvm.vector_math import exponential, tangent
from stages.engine.compiled.shape import ModelShape
from stages.engine.compiled.steps import KEY_FIELDS, Field, Header, KeyList

SUMS = 16  # vectors of outputs that are added to in turn: a processor adds to several at a time

Visit = Callable[[Sequence[Value], Value], None]  # what is done for the slots of some keys, and the number of the first


def emit_attend(module: ir.Module, shape: ModelShape) -> None:
    """Define the function of attention; its items are the key heads of all tokens."""
    emit = Emitter(module, "attend", WORK)
    _Attention(emit, shape).emit_groups()
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
        self._share, self._size = shape.heads // shape.key_heads, emit.field(header, Header.SCORES_SIZE)
        own = emit.multiply(emit.multiply(thread, self._share + 1), self._size)  # one line for the heads' sums
        self._scores = emit.offset(emit.pointer(header, Header.SCORES), own, 4)
        self._rows = emit.field(header, Header.ROWS)
        self._parts = range(0, shape.head_size, VECTOR_SIZE)  # of a head
        self._together = max(1, SUMS // len(self._parts))

    def emit_groups(self) -> None:
        """Emit the loop over items: the heads of a token that share a key head."""
        emit, shape = self._emit, self._shape
        with emit.loop(self._begin, self._end) as number:
            row, group = emit.remainder(number, self._rows), emit.divide(number, self._rows)
            keys = emit.offset(self._lists, emit.multiply(row, KEY_FIELDS), 8)
            count = emit.add(emit.field(keys, KeyList.CONSECUTIVE), emit.field(keys, KeyList.LENGTH))
            begin = emit.offset(self._cache, emit.multiply(group, shape.head_size), 4)
            first = emit.multiply(group, self._share * shape.head_size)
            queries = emit.offset(self._queries, emit.add(emit.multiply(row, shape.joined), first), 4)
            self._over_keys(keys, count, lambda slots, key: self._score_keys(begin, slots, queries, key, count))
            place = emit.add(emit.multiply(row, shape.heads * shape.head_size), first)
            outputs = emit.offset(self._outputs, place, 4)
            totals = emit.offset(self._scores, emit.multiply(self._size, self._share), 4)
            with emit.loop(0, self._share) as head:
                self._take_exponentials(head, count, totals)
                for part in self._parts:
                    emit.store(emit.floats(0.0), self._place_part(outputs, head, part))
            values = emit.offset(begin, shape.slot // 2, 4)
            self._over_keys(keys, count, lambda slots, key: self._add_values(values, slots, outputs, key))
            with emit.loop(0, self._share) as head:
                self._divide(head, outputs, totals)

    def _over_keys(self, keys: Value, count: Value, visit: Visit) -> None:
        """Emit what is done for every `VECTOR_SIZE` keys, in the order of the text. The list of a token's keys is at
        `keys`; for numbers beyond their count the last key is visited again. `visit` emits what is done.
        """
        emit = self._emit
        consecutive = emit.field(keys, KeyList.CONSECUTIVE)
        with emit.loop(0, count, VECTOR_SIZE) as number:
            follow = emit.builder.icmp_signed("<=", emit.add(number, VECTOR_SIZE), consecutive)
            with emit.builder.if_else(follow) as (consecutively, otherwise):
                with consecutively:
                    first = emit.add(emit.field(keys, KeyList.BEGIN), number)
                    visit([emit.add(first, place) for place in range(VECTOR_SIZE)], number)
                with otherwise:
                    visit([self._find_slot(keys, emit.add(number, place)) for place in range(VECTOR_SIZE)], number)

    def _find_slot(self, keys: Value, number: Value) -> Value:
        """Return the slot of a key, or that of the last one for a number beyond it."""
        emit, build = self._emit, self._emit.builder
        first, consecutive, branch, length = (emit.field(keys, field) for field in KeyList)
        last = emit.subtract(emit.add(consecutive, length), 1)
        number = build.select(build.icmp_signed("<", number, last), number, last)
        follows = build.icmp_signed("<", number, consecutive)
        place = build.select(follows, emit.long(0), emit.subtract(number, consecutive))
        other = emit.load(emit.offset(self._branches, emit.add(branch, place), 8), LONG, 8)
        return build.select(follows, emit.add(first, number), other)

    def _place_score(self, head: Value, number: Value) -> Value:
        return self._emit.offset(self._scores, self._emit.add(self._emit.multiply(self._size, head), number), 4)

    def _place_part(self, heads: Value, head: Value, part: int) -> Value:
        """Return the address of a part of one of consecutive heads."""
        return self._emit.offset(heads, self._emit.add(self._emit.multiply(head, self._shape.head_size), part), 4)

    def _score_keys(self, begin: Value, slots: Sequence[Value], queries: Value, number: Value, count: Value) -> None:
        """Store the scaled products of all heads with the keys in some slots; minus infinity beyond the last key."""
        emit, build = self._emit, self._emit.builder
        keys = [emit.offset(begin, emit.multiply(slot, self._shape.slot), 4) for slot in slots]
        for key in keys:  # their successors, if they follow each other
            emit.prefetch(emit.offset(key, VECTOR_SIZE * self._shape.slot, 4), 4 * self._shape.head_size)
        left = emit.spread(build.trunc(emit.subtract(count, number), INT))
        exists = build.icmp_signed("<", ir.Constant(INTS, list(range(VECTOR_SIZE))), left)
        scale = emit.floats(self._shape.scale)
        with emit.loop(0, self._share) as head:
            query = [
                build.fmul(emit.load(self._place_part(queries, head, part), VECTOR), scale) for part in self._parts
            ]
            products = []
            for key in keys:
                total = build.fmul(query[0], emit.load(key, VECTOR))
                for part, own in zip(self._parts[1:], query[1:], strict=True):
                    total = emit.multiply_add(own, emit.load(emit.offset(key, part, 4), VECTOR), total)
                products.append(total)
            scores = build.select(exists, self._limit(emit.totals(products)), emit.floats(-math.inf))
            emit.store(scores, self._place_score(head, number))

    def _limit(self, scores: Value) -> Value:
        cap, build = self._shape.cap, self._emit.builder
        if not cap:
            return scores
        return build.fmul(tangent(self._emit, build.fdiv(scores, self._emit.floats(cap))), self._emit.floats(cap))

    def _take_exponentials(self, head: Value, count: Value, totals: Value) -> None:
        """Replace a head's scores by the exponentials of their distances from the highest, and store the sum."""
        emit, build = self._emit, self._emit.builder
        kept = emit.variable(VECTOR, emit.floats(0.0))
        emit.set(kept, emit.floats(-math.inf))
        with emit.loop(0, count, VECTOR_SIZE) as number:
            scores, highest = emit.load(self._place_score(head, number), VECTOR), emit.get(kept, VECTOR)
            emit.set(kept, build.select(build.fcmp_ordered(">", scores, highest), scores, highest))
        maximum = f"llvm.vector.reduce.fmax.v{VECTOR_SIZE}f32"
        highest = emit.spread(emit.call(maximum, FLOAT, [emit.get(kept, VECTOR)]))
        emit.set(kept, emit.floats(0.0))
        with emit.loop(0, count, VECTOR_SIZE) as number:
            address = self._place_score(head, number)
            value = exponential(emit, build.fsub(emit.load(address, VECTOR), highest))
            emit.store(value, address)
            emit.set(kept, build.fadd(emit.get(kept, VECTOR), value))
        emit.store(emit.total(emit.get(kept, VECTOR)), emit.offset(totals, head, 4))

    def _add_values(self, begin: Value, slots: Sequence[Value], outputs: Value, number: Value) -> None:
        """Add the values in some slots to the outputs of all heads, each times its exponential."""
        emit = self._emit
        values = [emit.offset(begin, emit.multiply(slot, self._shape.slot), 4) for slot in slots]
        for first in range(0, self._share, self._together):
            heads = [emit.long(head) for head in range(first, min(first + self._together, self._share))]
            sums = [
                [emit.load(self._place_part(outputs, head, part), VECTOR) for part in self._parts] for head in heads
            ]
            for place, value in enumerate(values):
                parts = [emit.load(emit.offset(value, part, 4), VECTOR) for part in self._parts]
                for own, head in zip(sums, heads, strict=True):
                    share = emit.spread(emit.load(self._place_score(head, emit.add(number, place)), FLOAT))
                    own[:] = [emit.multiply_add(share, part, total) for part, total in zip(parts, own, strict=True)]
            for own, head in zip(sums, heads, strict=True):
                for part, total in zip(self._parts, own, strict=True):
                    emit.store(total, self._place_part(outputs, head, part))

    def _divide(self, head: Value, outputs: Value, totals: Value) -> None:
        emit = self._emit
        total = emit.spread(emit.load(emit.offset(totals, head, 4), FLOAT))
        for part in self._parts:
            address = self._place_part(outputs, head, part)
            emit.store(emit.builder.fdiv(emit.load(address, VECTOR), total), address)
