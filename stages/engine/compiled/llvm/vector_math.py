"""Functions of vectors: the exponential and what is made of it, and the preparation of a matrix's inputs.

Shapes: N rows, I inputs, G groups of inputs.
"""

import math
from enum import IntEnum

from llvmlite import ir

from stages.engine.compiled.llvm.emitter import BYTE, FLOAT, INTS, VECTOR, VECTOR_SIZE, Emitter, Value
from stages.engine.quantisation.groups import GROUP

LOWEST = -87.0  # its exponential is the smallest that is not taken for 0
# ln 2 in two parts: the first has so few bits that its product with an exponent is exact (Cephes, `expf`).
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXPONENTIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
HIGHEST = 88.0  # the exponential of more is infinite
# by the bits of rounded inputs; the two bytes of 16 bits are signed
LARGEST_CODES = {16: 127 * 256 + 127, 8: 127}
FLOAT_BITS = 32  # of inputs that are not rounded


def exponential(emit: Emitter, x: Value) -> Value:
    """Return e to the power of a vector, within one unit in the last place; 0 below `LOWEST`.

    The power of 2 next to the result is an exponent; the rest is a polynomial of Cephes (S. Moshier). The vector must
    be at most `HIGHEST`.
    """
    build = emit.builder
    bounded = build.select(build.fcmp_ordered(">", x, emit.floats(LOWEST)), x, emit.floats(LOWEST))
    power = emit.call(f"llvm.rint.v{VECTOR_SIZE}f32", VECTOR, [build.fmul(bounded, emit.floats(1 / math.log(2)))])
    rest = emit.multiply_add(power, emit.floats(-LN2_HIGH), bounded)
    rest = emit.multiply_add(power, emit.floats(-LN2_LOW), rest)
    value = emit.floats(EXPONENTIAL[0])
    for factor in EXPONENTIAL[1:]:
        value = emit.multiply_add(value, rest, emit.floats(factor))
    value = build.fadd(emit.multiply_add(value, build.fmul(rest, rest), rest), emit.floats(1.0))
    bits = build.shl(build.add(build.fptosi(power, INTS), emit.ints(127)), emit.ints(23))
    value = build.fmul(value, build.bitcast(bits, VECTOR))
    # Not a number stays one: it is not below anything.
    value = build.select(build.fcmp_unordered("uno", x, x), x, value)
    return build.select(build.fcmp_ordered("<", x, emit.floats(LOWEST)), emit.floats(0.0), value)


def one_and_exponential(emit: Emitter, x: Value) -> Value:
    """Return one and e to the power of a vector, of `HIGHEST` where it is larger: one over the logistic function."""
    build, highest = emit.builder, emit.floats(HIGHEST)
    bounded = build.select(build.fcmp_ordered(">", x, highest), highest, x)
    return build.fadd(exponential(emit, bounded), emit.floats(1.0))


def tangent(emit: Emitter, x: Value) -> Value:
    """Return the hyperbolic tangent of a vector, within a few units of the last place of 1."""
    build = emit.builder
    share = build.fdiv(emit.floats(2.0), one_and_exponential(emit, build.fmul(x, emit.floats(2.0))))
    return build.fsub(emit.floats(1.0), share)


class InputSum(IntEnum):
    """What is stored of a group of a row's inputs, in 32 bits each: sums of the group and of its halves, the scale."""

    SUM = 0  # to 2: in float32
    MINUS_CODES = 3  # to 5: sums of rounded inputs as integers, times -1
    SCALE = 6  # of rounded inputs


INPUT_SUMS = 8  # numbers per group


def store_inputs(emit: Emitter, group: tuple[Value, Value], inputs: Value, sums: Value, *, bits: int) -> None:
    """Store a group of a row's inputs as a product reads them, and their sums. `sums` is the address of its numbers,
    see `InputSum`. An input has 32 bits, or 16 or 8 if rounded with one scale for the group. Of 16 bits the lower bytes
    are stored first, signed, and then the higher ones.
    """
    build = emit.builder
    if bits == FLOAT_BITS:
        for half, vector in enumerate(group):
            emit.store(vector, emit.offset(inputs, half * VECTOR_SIZE, 4))
        for place, vector in enumerate((build.fadd(*group), *group)):
            emit.store(emit.total(vector), emit.offset(sums, InputSum.SUM + place, 4))
        return
    sizes = [emit.call(f"llvm.fabs.v{VECTOR_SIZE}f32", VECTOR, [vector]) for vector in group]
    larger = build.select(build.fcmp_unordered("<", sizes[0], sizes[1]), sizes[1], sizes[0])
    largest = emit.call(f"llvm.vector.reduce.fmax.v{VECTOR_SIZE}f32", FLOAT, [larger])
    scale = build.fdiv(largest, ir.Constant(FLOAT, LARGEST_CODES[bits]))
    tiny = build.fcmp_ordered("<", largest, ir.Constant(FLOAT, 1e-30))
    factor = build.select(tiny, ir.Constant(FLOAT, 0.0), build.fdiv(ir.Constant(FLOAT, LARGEST_CODES[bits]), largest))
    parts = []
    for half, vector in enumerate(group):
        steps = emit.call(f"llvm.rint.v{VECTOR_SIZE}f32", VECTOR, [build.fmul(vector, emit.spread(factor))])
        codes = build.fptosi(steps, INTS)
        parts.append(codes)
        higher = build.ashr(build.add(codes, emit.ints(128)), emit.ints(8))
        for place, own in enumerate((codes, higher)[: bits // 8]):  # the lower byte, and what it leaves
            short = build.trunc(own, ir.VectorType(BYTE, VECTOR_SIZE))
            emit.store(short, emit.offset(inputs, place * GROUP + half * VECTOR_SIZE, 1))
    # A maximum passes over what is not a number; a sum does not.
    poison = build.fmul(emit.total(build.fadd(*group)), ir.Constant(FLOAT, 0.0))
    scale = build.fadd(scale, poison)
    emit.store(scale, emit.offset(sums, InputSum.SCALE, 4))
    for place, codes in enumerate((build.add(*parts), *parts)):
        whole = emit.total(codes)
        scaled = build.fmul(scale, build.sitofp(whole, FLOAT))
        emit.store(scaled, emit.offset(sums, InputSum.SUM + place, 4))
        emit.store(build.neg(whole), emit.offset(sums, InputSum.MINUS_CODES + place, 4))


def sizes_of_group(bits: int) -> tuple[int, int]:
    """Return the bytes of a group's inputs of some bits, and of their sums (`store_inputs`)."""
    return bits // 8 * GROUP, 4 * INPUT_SUMS
