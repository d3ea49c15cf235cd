"""Steps between the products of a layer, each row of which is computed by itself: norms, the gate, the rotation.

Shapes: N rows, W width, E of a head, P positions.
"""

from collections.abc import Callable

from llvmlite import ir

from stages.compiled.emitter import FLOAT, LONG, VECTOR, VECTOR_SIZE, WORK, Emitter, Value
from stages.compiled.shape import ModelShape
from stages.compiled.steps import Field, Header
from stages.compiled.vector_math import exponential, sizes_of_group, store_inputs
from stages.quantisation.groups import GROUP

HIGHEST = 88.0  # the exponential of more is infinite


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
        with emit.condition(picks):
            emit.set(source, emit.load(emit.offset(emit.pointer(header, Header.WANTED_ROWS), row, 8), LONG, 8))
        start = emit.offset(inputs, emit.multiply(emit.get(source, LONG), shape.width), 4)
        factor = emit.spread(_inverse_root(emit, start, shape.width, shape.eps))

        def normalise(place: Value) -> Value:
            scaled = emit.builder.fmul(emit.load(emit.offset(start, place, 4), VECTOR), factor)
            return emit.builder.fmul(scaled, emit.load(emit.offset(weights, place, 4), VECTOR))

        _store_row(emit, row, shape.width // GROUP, normalise)
    emit.finish()


def emit_round(module: ir.Module, shape: ModelShape) -> None:
    """Define the function that prepares the outputs of attention for a product."""
    emit = Emitter(module, "round", WORK)
    step = emit.arguments[0]
    inputs, width = emit.pointer(step, Field.INPUTS), shape.heads * shape.head_size
    with emit.loop(*emit.arguments[2:4]) as row:
        start = emit.offset(inputs, emit.multiply(row, width), 4)
        _store_row(emit, row, width // GROUP, lambda place: emit.load(emit.offset(start, place, 4), VECTOR))
    emit.finish()


def emit_gate(module: ir.Module, shape: ModelShape) -> None:
    """Define the function that computes `silu(gate) * up` and prepares the next product."""
    emit = Emitter(module, "gate", WORK)
    step = emit.arguments[0]
    inputs, build = emit.pointer(step, Field.INPUTS), emit.builder
    with emit.loop(*emit.arguments[2:4]) as row:
        start = emit.offset(inputs, emit.multiply(row, emit.field(step, Field.STRIDE)), 4)

        def multiply(place: Value) -> Value:
            gate = emit.load(emit.offset(start, place, 4), VECTOR)
            up = emit.load(emit.offset(start, emit.add(place, shape.inner), 4), VECTOR)
            turned = build.fneg(gate)
            highest = emit.floats(HIGHEST)
            turned = build.select(build.fcmp_ordered(">", turned, highest), highest, turned)
            share = build.fadd(exponential(emit, turned), emit.floats(1.0))
            return build.fmul(build.fdiv(gate, share), up)

        _store_row(emit, row, shape.inner // GROUP, multiply)
    emit.finish()


def emit_rotate(module: ir.Module, shape: ModelShape) -> None:
    """Define the function that rotates queries and keys by their position and stores keys and values in the cache.

    A head's two halves are the parts of complex numbers, as in `transformers`. Heads have a norm first in some models.
    """
    emit = Emitter(module, "rotate", WORK)
    step, header = emit.arguments[:2]
    joined, cache = emit.pointer(step, Field.INPUTS), emit.pointer(step, Field.CACHE)
    rotations, size = emit.pointer(header, Header.ROTATIONS), shape.head_size
    keys_begin = shape.heads * size
    with emit.loop(*emit.arguments[2:4]) as row:
        position = emit.load(emit.offset(emit.pointer(header, Header.POSITIONS), row, 8), LONG, 8)
        turns = emit.offset(rotations, emit.multiply(position, size), 4)
        slot = emit.load(emit.offset(emit.pointer(header, Header.SLOTS), row, 8), LONG, 8)
        stored = emit.offset(cache, emit.multiply(slot, shape.slot), 4)
        start = emit.offset(joined, emit.multiply(row, shape.joined), 4)
        with emit.loop(0, shape.heads) as head:
            here = emit.offset(start, emit.multiply(head, size), 4)
            _rotate_head(emit, shape, here, here, turns, emit.pointer(step, Field.WEIGHTS))
        with emit.loop(0, shape.key_heads) as head:
            begin = emit.multiply(head, size)
            here = emit.offset(start, emit.add(begin, keys_begin), 4)
            own = emit.pointer(step, Field.KEY_WEIGHTS)
            _rotate_head(emit, shape, here, emit.offset(stored, begin, 4), turns, own)
        half = shape.key_heads * size
        with emit.loop(0, half, VECTOR_SIZE) as place:
            value = emit.load(emit.offset(start, emit.add(place, keys_begin + half), 4), VECTOR)
            emit.store(value, emit.offset(stored, emit.add(place, half), 4))
    emit.finish()


def _rotate_head(emit: Emitter, shape: ModelShape, head: Value, target: Value, turns: Value, weights: Value) -> None:
    """Rotate one head; the cosines of a position are followed by its sines."""
    build, half = emit.builder, shape.head_size // 2
    kind = ir.VectorType(FLOAT, _vector_size_of(half))
    step = kind.count

    def load(address: Value, place: int) -> Value:
        return emit.load(emit.offset(address, place, 4), kind)

    factor = None
    if shape.head_norms:
        root = _inverse_root(emit, head, shape.head_size, shape.eps)
        nothing = ir.Constant(VECTOR, ir.Undefined)
        order = ir.Constant(ir.VectorType(ir.IntType(32), step), [0] * step)
        factor = build.shuffle_vector(emit.spread(root), nothing, order)
    loaded = []
    for place in range(0, half, step):
        parts = [load(head, place), load(head, place + half)]
        if factor is not None:
            own = [load(weights, place), load(weights, place + half)]
            parts = [build.fmul(build.fmul(part, factor), one) for part, one in zip(parts, own, strict=True)]
        loaded.append((place, parts))
    for place, (first, second) in loaded:
        cosine, sine = load(turns, place), load(turns, place + half)
        real = build.fsub(build.fmul(first, cosine), build.fmul(second, sine))
        imaginary = build.fadd(build.fmul(second, cosine), build.fmul(first, sine))
        emit.store(real, emit.offset(target, place, 4))
        emit.store(imaginary, emit.offset(target, place + half, 4))


def _vector_size_of(size: int) -> int:
    """Return the largest size of a vector, of at most `VECTOR_SIZE`, that divides a size."""
    return next(count for count in (VECTOR_SIZE, 8, 4, 2, 1) if size % count == 0)


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
    """Store a row as the inputs of a product, rounded or not as the step states.

    Args:
        emit: of the function.
        row: its number.
        groups: of its numbers.
        compute: returns the vector at a place of the row.
    """
    step = emit.arguments[0]
    outputs, sums = emit.pointer(step, Field.OUTPUTS), emit.pointer(step, Field.OUTPUT_SUMS)
    rounds = emit.builder.icmp_signed("!=", emit.field(step, Field.ROUNDS), emit.long(0))
    first = emit.multiply(row, groups)
    with emit.loop(0, groups) as group:
        begin, number = emit.multiply(group, GROUP), emit.add(first, group)
        values = (compute(begin), compute(emit.add(begin, VECTOR_SIZE)))
        with emit.builder.if_else(rounds) as (rounded, exact):
            for branch, is_rounded in ((rounded, True), (exact, False)):
                with branch:
                    input_bytes, sum_bytes = sizes_of_group(rounds=is_rounded)
                    own = emit.offset(outputs, number, input_bytes), emit.offset(sums, number, sum_bytes)
                    store_inputs(emit, values, *own, rounds=is_rounded)
