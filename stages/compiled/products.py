"""Products of a few rows with a matrix, from its stored form: codes in groups, or numbers of 16 or 32 bits.

A block of `LANES` outputs is computed at once, one output per number of a vector. Their codes are stored input by
input, so that a vector holds the same input's codes of all outputs: the codes are unpacked once for up to `TILE` rows.
Of a group, a row's sum is `scale * (codes . inputs) + minimum * (sum of the inputs)`.

The sums of a row are added in the same order for every number of rows, so a row has the same bits alone and in any
batch. With inputs in eight bits the products of a group are sums of integers.

Shapes: N rows, O outputs, I inputs, G groups of inputs, B blocks of outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from stages.compiled.emitter import FLOAT, HALF, INT, INTS, LANES, POINTER, VECTOR, WORK, Emitter, Value
from stages.compiled.machine import Features
from stages.compiled.steps import Field, Header
from stages.compiled.vector_math import sizes_of_group
from stages.quantisation.groups import GROUP

TILE = 8  # rows that share the unpacking of a block: their sums fit the 32 registers of AVX-512
NARROW_TILE = 3  # with 16 registers of half the size
CHAINS = 2  # sums of a group that are added at its end: a processor adds to several at a time
BYTES = 4 * LANES  # of a vector


@dataclass(frozen=True)
class ProductKind:
    """How a matrix is stored, and how its inputs are.

    Attributes:
        bits: of a code: 4 or 8; of a number: 16 (bfloat16) or 32.
        wide_scales: whether scales and minima have 32 bits instead of 16.
        rounds: whether inputs are rounded to eight bits.
    """

    bits: int
    wide_scales: bool = False
    rounds: bool = False

    @property
    def name(self) -> str:
        """The name of its function."""
        scales = "_wide" if self.wide_scales else ""
        return f"product{self.bits}{scales}{'_rounded' if self.rounds else ''}"

    @property
    def has_groups(self) -> bool:
        """Whether it has codes with scales and minima."""
        return self.bits <= 8


def emit_product(module: ir.Module, kind: ProductKind, features: Features) -> None:
    """Define the function of a kind of products; its items are blocks of outputs."""
    emit = Emitter(module, kind.name, WORK)
    _Product(emit, kind, features).emit_blocks()
    emit.finish()


class _Product:
    """Emits the parts of a product."""

    def __init__(self, emit: Emitter, kind: ProductKind, features: Features) -> None:
        self._emit, self._kind, self._features = emit, kind, features
        step, header, self._begin, self._end, _ = emit.arguments
        self._fields = step
        self._rows = emit.field(header, Header.ROWS)
        wanted = emit.builder.icmp_signed("!=", emit.field(step, Field.WANTED_ONLY), emit.long(0))
        self._rows = emit.builder.select(wanted, emit.field(header, Header.WANTED), self._rows)
        self._groups = emit.field(step, Field.GROUPS)
        self._tile = TILE if features.wide_registers else NARROW_TILE
        self._group_bytes = kind.bits * GROUP * LANES // 8
        self._scale_bytes = LANES * (4 if kind.wide_scales else 2)
        self._sums = [emit.variable(VECTOR, emit.floats(0.0)) for _ in range(self._tile)]

    def emit_blocks(self) -> None:
        """Emit the loop over blocks, and over tiles of rows within."""
        emit = self._emit
        rest = emit.remainder(self._rows, self._tile)
        whole = emit.subtract(self._rows, rest)
        with emit.loop(self._begin, self._end) as block:
            with emit.loop(0, whole, self._tile) as row:
                self._emit_tile(block, row, self._tile)
            emit.switch(rest, {rows: partial(self._emit_tile, block, whole, rows) for rows in range(1, self._tile)})

    def _emit_tile(self, block: Value, row: Value, rows: int) -> None:
        """Emit the sums of some rows over all groups, and their outputs."""
        emit, kind = self._emit, self._kind
        input_bytes, sum_bytes = sizes_of_group(rounds=kind.rounds)
        first = emit.multiply(block, self._groups)
        codes = emit.offset(emit.pointer(self._fields, Field.MATRIX), first, self._group_bytes)
        scales, minima = (
            emit.offset(emit.pointer(self._fields, field), first, self._scale_bytes)
            for field in (Field.SCALES, Field.MINIMA)
        )
        all_inputs, all_sums = emit.pointer(self._fields, Field.INPUTS), emit.pointer(self._fields, Field.INPUT_SUMS)
        starts = [emit.multiply(emit.add(row, number), self._groups) for number in range(rows)]
        inputs = [emit.offset(all_inputs, start, input_bytes) for start in starts]
        input_sums = [emit.offset(all_sums, start, sum_bytes) for start in starts]
        for total in self._sums[:rows]:
            emit.set(total, emit.floats(0.0))
        with emit.loop(0, self._groups) as group:
            here = emit.offset(codes, group, self._group_bytes)
            own = [emit.offset(start, group, input_bytes) for start in inputs]
            products = self._multiply_codes(here, own) if kind.rounds else self._multiply_numbers(here, own)
            if kind.has_groups:
                scale, minimum = (
                    self._load_scales(emit.offset(start, group, self._scale_bytes)) for start in (scales, minima)
                )
                for total, product, start in zip(self._sums, products, input_sums, strict=False):
                    self._add_group(total, product, scale, minimum, emit.offset(start, group, sum_bytes))
            else:
                for total, product in zip(self._sums, products, strict=False):
                    emit.set(total, emit.builder.fadd(emit.get(total, VECTOR), product))
        for number, total in enumerate(self._sums[:rows]):
            self._store_outputs(block, emit.add(row, number), emit.get(total, VECTOR))

    def _add_group(self, total: Value, product: Value, scale: Value, minimum: Value, sums: Value) -> None:
        """Add a group's product, scaled, and its minimum times the inputs' sum."""
        emit = self._emit
        if self._kind.rounds:
            scale = emit.builder.fmul(scale, emit.spread(emit.load(sums, FLOAT)))
            sums = emit.offset(sums, 1, 4)
        value = emit.fused(product, scale, emit.get(total, VECTOR))
        emit.set(total, emit.fused(minimum, emit.spread(emit.load(sums, FLOAT)), value))

    def _load_scales(self, address: Value) -> Value:
        emit = self._emit
        if self._kind.wide_scales:
            return emit.load(address, VECTOR, 64)
        return emit.builder.fpext(emit.load(address, ir.VectorType(HALF, LANES), 32), VECTOR)

    def _store_outputs(self, block: Value, row: Value, outputs: Value) -> None:
        """Add the bias and what the outputs are added to, and store them."""
        emit, build = self._emit, self._emit.builder
        place = emit.add(emit.multiply(row, emit.field(self._fields, Field.STRIDE)), emit.multiply(block, LANES))
        address = emit.offset(emit.pointer(self._fields, Field.OUTPUTS), place, 4)
        value = emit.variable(VECTOR, emit.floats(0.0))
        emit.set(value, outputs)
        bias = emit.field(self._fields, Field.BIAS)
        with emit.condition(build.icmp_signed("!=", bias, emit.long(0))):
            own = emit.load(emit.offset(build.inttoptr(bias, POINTER), emit.multiply(block, LANES), 4), VECTOR)
            emit.set(value, build.fadd(emit.get(value, VECTOR), own))
        with emit.condition(build.icmp_signed("!=", emit.field(self._fields, Field.ADDS), emit.long(0))):
            emit.set(value, build.fadd(emit.load(address, VECTOR), emit.get(value, VECTOR)))
        emit.store(emit.get(value, VECTOR), address)

    def _multiply_numbers(self, codes: Value, inputs: Sequence[Value]) -> list[Value]:
        """Return, per row, the products of a group's weights or codes with the inputs, in float32."""
        emit = self._emit
        chains: list[list[Value | None]] = [[None] * CHAINS for _ in inputs]
        for place, (number, weights) in enumerate(self._unpack_numbers(codes)):
            for row, start in enumerate(inputs):
                own = emit.spread(emit.load(emit.offset(start, number, 4), FLOAT))
                before = chains[row][place % CHAINS]
                chains[row][place % CHAINS] = (
                    emit.builder.fmul(weights, own) if before is None else emit.fused(weights, own, before)
                )
        return [emit.builder.fadd(*chain) for chain in chains]

    def _unpack_numbers(self, codes: Value) -> Sequence[tuple[int, Value]]:
        """Yield the number of every input of a group and its weights or codes as a vector of float32."""
        emit, bits = self._emit, self._kind.bits
        if bits == 32:
            return [(place, emit.load(emit.offset(codes, place, BYTES), VECTOR, 64)) for place in range(GROUP)]
        if bits == 16:
            return [(place, self._widen(emit.offset(codes, place, BYTES // 2))) for place in range(GROUP)]
        unpacked = []
        for vector in range(GROUP * bits // 32):
            packed = emit.load(emit.offset(codes, vector, BYTES), INTS, 64)
            for part in range(32 // bits):
                shifted = emit.builder.lshr(packed, emit.ints(part * bits)) if part else packed
                unpacked.append((_input_of(vector, part, bits), self._number_code(shifted)))
        return unpacked

    def _widen(self, address: Value) -> Value:
        """Load numbers of bfloat16: the high halves of float32."""
        emit = self._emit
        short = emit.load(address, ir.VectorType(ir.IntType(16), LANES), 32)
        return emit.builder.bitcast(emit.builder.shl(emit.builder.zext(short, INTS), emit.ints(16)), VECTOR)

    def _number_code(self, shifted: Value) -> Value:
        """Return the codes in the lowest bits as float32."""
        emit, bits = self._emit, self._kind.bits
        if bits == 4 and self._features.looks_up_floats:  # by the lowest four bits of each index
            table = ir.Constant(VECTOR, [float(code) for code in range(LANES)])
            return emit.call("llvm.x86.avx512.permvar.sf.512", VECTOR, [table, shifted])
        return emit.builder.uitofp(emit.builder.and_(shifted, emit.ints((1 << bits) - 1)), VECTOR)

    def _multiply_codes(self, codes: Value, inputs: Sequence[Value]) -> list[Value]:
        """Return, per row, the products of a group's codes with the rounded inputs: sums of integers."""
        emit = self._emit
        totals: list[Value] = [emit.ints(0) for _ in inputs]
        for quad, unpacked in enumerate(self._unpack_quads(codes)):
            for row, start in enumerate(inputs):
                four = emit.spread(emit.load(emit.offset(start, quad, 4), INT))
                totals[row] = self._features.add_dot(emit, totals[row], unpacked, four)
        return [emit.builder.sitofp(total, VECTOR) for total in totals]

    def _unpack_quads(self, codes: Value) -> list[Value]:
        """Return, per four inputs of a group, their codes in bytes: four of each output."""
        emit = self._emit
        mask, unpacked = emit.ints(0x0F0F0F0F), []
        for vector in range(GROUP * self._kind.bits // 32):
            packed = emit.load(emit.offset(codes, vector, BYTES), INTS, 64)
            if self._kind.bits == 8:
                unpacked.append(packed)
            else:
                high = emit.builder.lshr(packed, emit.ints(4))
                unpacked += [emit.builder.and_(half, mask) for half in (packed, high)]
        return unpacked


def _input_of(vector: int, part: int, bits: int) -> int:
    """Return which input of a group the codes at a place of a packed vector belong to (`stages/compiled/packing.py`).

    Four inputs are neighbours in a number of 32 bits, one per byte; with four bits, four more are in the high halves.

    >>> [_input_of(1, part, 4) for part in range(8)]
    [8, 12, 9, 13, 10, 14, 11, 15]
    """
    if bits == 8:
        return 4 * vector + part
    byte, high = divmod(part, 2)
    return 8 * vector + 4 * high + byte
