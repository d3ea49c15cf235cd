"""Steps between the products of a layer, each row of which is computed by itself: norms, the gate, the rotation.

Shapes: N rows, W width, E of a head, P positions.
"""

import math
from collections.abc import Callable
from functools import partial

from llvmlite import ir

from stages.engine.compiled.llvm.emitter import FLOAT, LONG, VECTOR, VECTOR_SIZE, WORK, Emitter, Value
from stages.engine.compiled.llvm.vector_math import (
    FLOAT_BITS,
    LARGEST_CODES,
    one_and_exponential,
    sizes_of_group,
    store_inputs,
)
from stages.engine.compiled.shape import GateFunction, HeadNorm, ModelShape
from stages.engine.compiled.steps import Field, Header
from stages.engine.quantisation.groups import GROUP

# The tanh in GELU is of `ROOT * (x + CUBE * x**3)`.
ROOT, CUBE = math.sqrt(2 / math.pi), 0.044715


def emit_normalise(module: ir.Module, shape: ModelShape) -> None:
    """Define the function that divides rows by the root of their mean square, scales them, and prepares a product.

    In the last step only rows whose logits are wanted are read, by their indices.
    """
    emit = Emitter(module, "normalise", WORK)
    step, header = emit.arguments[:2]
    inputs, weights = emit.pointer(step, Field.INPUTS), emit.pointer(step, Field.WEIGHTS)
    wanted_only = emit.field(step, Field.WANTED_ONLY)
    picks = emit.builder.icmp_signed("!=", wanted_only, emit.long(0))
    source = emit.variable(LONG, emit.long(0))
    with emit.loop(*emit.arguments[2:4]) as row:
        emit.set(source, row)
        with emit.builder.if_then(picks):
            emit.set(source, emit.load(emit.offset(emit.pointer(header, Header.WANTED_ROWS), row, 8), LONG, 8))
        start = emit.offset(inputs, emit.multiply(emit.get(source, LONG), shape.width), 4)
        factor = emit.spread(_inverse_root(emit, start, shape.width, shape.eps))

        def normalise(place: Value) -> Value:
            scaled = emit.builder.fmul(emit.load(emit.offset(start, place, 4), VECTOR), factor)
            return emit.builder.fmul(scaled, emit.load(emit.offset(weights, place, 4), VECTOR))

        _store_row(emit, row, shape.width // GROUP, normalise)
    emit.finish()


def emit_round(module: ir.Module, shape: ModelShape) -> None:
    """Define the function that prepares rows, such as the outputs of attention, for a product."""
    emit = Emitter(module, "round", WORK)
    step = emit.arguments[0]
    inputs, groups = emit.pointer(step, Field.INPUTS), emit.field(step, Field.GROUPS)
    with emit.loop(*emit.arguments[2:4]) as row:
        start = emit.offset(inputs, emit.multiply(emit.multiply(row, groups), GROUP), 4)
        _store_row(emit, row, groups, lambda place: emit.load(emit.offset(start, place, 4), VECTOR))
    emit.finish()


def emit_add(module: ir.Module, shape: ModelShape) -> None:
    """Define the function that normalises rows and adds them to the states: a norm after a part of a layer."""
    emit = Emitter(module, "add", WORK)
    step = emit.arguments[0]
    inputs, states, weights = (emit.pointer(step, field) for field in (Field.INPUTS, Field.OUTPUTS, Field.WEIGHTS))
    with emit.loop(*emit.arguments[2:4]) as row:
        start, state = (emit.offset(one, emit.multiply(row, shape.width), 4) for one in (inputs, states))
        factor = emit.spread(_inverse_root(emit, start, shape.width, shape.eps))
        with emit.loop(0, shape.width, VECTOR_SIZE) as place:
            address = emit.offset(state, place, 4)
            own = emit.builder.fmul(emit.load(emit.offset(start, place, 4), VECTOR), factor)
            own = emit.builder.fmul(own, emit.load(emit.offset(weights, place, 4), VECTOR))
            emit.store(emit.builder.fadd(emit.load(address, VECTOR), own), address)
    emit.finish()


def emit_gate(module: ir.Module, shape: ModelShape) -> None:
    """Define the function that computes `function(gate) * up` and prepares the next product.

    The function of x is x times the logistic function: of x itself (SiLU), or of a polynomial (GELU by a tanh, which is
    one of twice its argument).
    """
    emit = Emitter(module, "gate", WORK)
    step = emit.arguments[0]
    inputs, build = emit.pointer(step, Field.INPUTS), emit.builder
    with emit.loop(*emit.arguments[2:4]) as row:
        start = emit.offset(inputs, emit.multiply(row, emit.field(step, Field.STRIDE)), 4)

        def multiply(place: Value) -> Value:
            gate = emit.load(emit.offset(start, place, 4), VECTOR)
            up = emit.load(emit.offset(start, emit.add(place, shape.inner), 4), VECTOR)
            argument = gate
            if shape.gate is GateFunction.GELU:
                cube = emit.multiply_add(build.fmul(gate, gate), emit.floats(CUBE), emit.floats(1.0))
                argument = build.fmul(build.fmul(gate, emit.floats(2 * ROOT)), cube)
            return build.fmul(build.fdiv(gate, one_and_exponential(emit, build.fneg(argument))), up)

        _store_row(emit, row, shape.inner // GROUP, multiply)
    emit.finish()


def emit_rotate(module: ir.Module, shape: ModelShape) -> None:
    """Define the function that rotates queries and keys by their position and stores keys and values in the cache.

    The two halves of what is rotated of a head are the parts of complex numbers, as in `transformers`. In some models
    heads have a norm first: each its own, or one for all queries and one for all keys.
    """
    emit = Emitter(module, "rotate", WORK)
    step, header = emit.arguments[:2]
    joined, cache = emit.pointer(step, Field.INPUTS), emit.pointer(step, Field.CACHE)
    slides = emit.builder.icmp_signed("!=", emit.field(step, Field.SLIDES), emit.long(0))
    tables = emit.pointer(header, Header.WINDOW_ROTATIONS), emit.pointer(header, Header.ROTATIONS)
    rotations, size = emit.builder.select(slides, *tables), shape.head_size
    keys_begin = shape.heads * size
    with emit.loop(*emit.arguments[2:4]) as row:
        position = emit.load(emit.offset(emit.pointer(header, Header.POSITIONS), row, 8), LONG, 8)
        turns = emit.offset(rotations, emit.multiply(position, shape.rotated), 4)
        slot = emit.load(emit.offset(emit.pointer(header, Header.SLOTS), row, 8), LONG, 8)
        stored = emit.offset(cache, emit.multiply(slot, shape.slot), 4)
        start = emit.offset(joined, emit.multiply(row, shape.joined), 4)
        keys = emit.offset(start, keys_begin, 4)
        parts = ((start, start, shape.heads, Field.WEIGHTS), (keys, stored, shape.key_heads, Field.KEY_WEIGHTS))
        for source, target, heads, field in parts:
            norm = _HeadNorm(emit, shape, emit.pointer(step, field), source, heads)
            with emit.loop(0, heads) as head:
                begin = emit.multiply(head, size)
                here, there = (emit.offset(one, begin, 4) for one in (source, target))
                _rotate_head(emit, shape, here, there, turns, norm.find_weights(head, here))
        half = shape.key_heads * size
        with emit.loop(0, half, VECTOR_SIZE) as place:
            value = emit.load(emit.offset(start, emit.add(place, keys_begin + half), 4), VECTOR)
            emit.store(value, emit.offset(stored, emit.add(place, half), 4))
    emit.finish()


class _HeadNorm:
    """The norm of consecutive heads."""

    def __init__(self, emit: Emitter, shape: ModelShape, weights: Value, heads: Value, count: int) -> None:
        self._emit, self._shape, self._weights = emit, shape, weights
        together = shape.head_norm is HeadNorm.ALL
        self._root = _inverse_root(emit, heads, count * shape.head_size, shape.eps) if together else None

    def find_weights(self, head: Value, place: Value) -> tuple[Value, Value] | None:
        """Return what the numbers of a head are divided by, as a factor, and the address of their weights."""
        emit, shape = self._emit, self._shape
        if shape.head_norm is HeadNorm.NOTHING:
            return None
        if self._root is not None:
            return self._root, emit.offset(self._weights, emit.multiply(head, shape.head_size), 4)
        return _inverse_root(emit, place, shape.head_size, shape.eps), self._weights


def _rotate_head(
    emit: Emitter, shape: ModelShape, head: Value, target: Value, turns: Value, norm: tuple[Value, Value] | None
) -> None:
    """Rotate one head; the cosines of a position are followed by its sines. `turns` is the address of the cosines,
    `norm` the factor and the address of the weights of its norm.
    """
    build, half = emit.builder, shape.rotated // 2
    kind = ir.VectorType(FLOAT, next(count for count in (VECTOR_SIZE, 8, 4, 2, 1) if half % count == 0))
    step = kind.count

    def load(address: Value, place: int) -> Value:
        return emit.load(emit.offset(address, place, 4), kind)

    factor = None
    if norm is not None:
        nothing = ir.Constant(VECTOR, ir.Undefined)
        order = ir.Constant(ir.VectorType(ir.IntType(32), step), [0] * step)
        factor = build.shuffle_vector(emit.spread(norm[0]), nothing, order)

    def read(place: int) -> Value:
        value = load(head, place)
        return value if norm is None else build.fmul(build.fmul(value, factor), load(norm[1], place))

    loaded = [(place, read(place), read(place + half)) for place in range(0, half, step)]
    rest = [(place, read(place)) for place in range(shape.rotated, shape.head_size, step)]
    for place, first, second in loaded:
        cosine, sine = load(turns, place), load(turns, place + half)
        real = build.fsub(build.fmul(first, cosine), build.fmul(second, sine))
        imaginary = build.fadd(build.fmul(second, cosine), build.fmul(first, sine))
        emit.store(real, emit.offset(target, place, 4))
        emit.store(imaginary, emit.offset(target, place + half, 4))
    for place, value in rest:
        emit.store(value, emit.offset(target, place, 4))


def _inverse_root(emit: Emitter, start: Value, size: int, eps: float) -> Value:
    """Return one over the root of the mean square of consecutive numbers, a multiple of `VECTOR_SIZE`."""
    build, total = emit.builder, emit.variable(VECTOR, emit.floats(0.0))
    emit.set(total, emit.floats(0.0))
    with emit.loop(0, size, VECTOR_SIZE) as place:
        value = emit.load(emit.offset(start, place, 4), VECTOR)
        emit.set(total, emit.multiply_add(value, value, emit.get(total, VECTOR)))
    mean = build.fdiv(emit.total(emit.get(total, VECTOR)), ir.Constant(FLOAT, float(size)))
    root = emit.call("llvm.sqrt.f32", FLOAT, [build.fadd(mean, ir.Constant(FLOAT, eps))])
    return build.fdiv(ir.Constant(FLOAT, 1.0), root)


def _store_row(emit: Emitter, row: Value, groups: int, compute: Callable[[Value], Value]) -> None:
    """Store a row as the inputs of a product, rounded or not as the step states."""
    step = emit.arguments[0]
    outputs, sums = emit.pointer(step, Field.OUTPUTS), emit.pointer(step, Field.OUTPUT_SUMS)
    first = emit.multiply(row, groups)
    with emit.loop(0, groups) as group:
        begin, number = emit.multiply(group, GROUP), emit.add(first, group)
        values = (compute(begin), compute(emit.add(begin, VECTOR_SIZE)))

        def store(bits: int, values: tuple[Value, Value] = values, number: Value = number) -> None:
            input_bytes, sum_bytes = sizes_of_group(bits)
            own = emit.offset(outputs, number, input_bytes), emit.offset(sums, number, sum_bytes)
            store_inputs(emit, values, *own, bits=bits)

        kinds = (FLOAT_BITS, *LARGEST_CODES)
        emit.switch(emit.field(step, Field.INPUT_BITS), {bits: partial(store, bits) for bits in kinds})
