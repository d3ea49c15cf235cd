"""Products of a few rows with a matrix, from its stored form: codes in groups, or numbers of 16 or 32 bits.

A block of `VECTOR_SIZE` outputs is computed at once, one output per number of a vector. Their codes are stored input by
input, so that a vector holds the same input's codes of all outputs: the codes are unpacked once for up to `TILE` rows.
Of a group, a row's sum is `scale * (codes . inputs) + minimum * (sum of the inputs)`; signed codes have no minimum, and
where a group has two scales, one for each half, it is two such sums.

The sums of a row are added in the same order for every number of rows, so a row has the same bits alone and in any
batch. With inputs of 16 or 8 bits the products of a group are sums of integers, two or four at a time.

Shapes: N rows, O outputs, I inputs, G groups of inputs, B blocks of outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from llvmlite import ir

from stages.engine.compiled.llvm.emitter import (
    FLOAT,
    HALF,
    INT,
    INTS,
    POINTER,
    VECTOR,
    VECTOR_SIZE,
    WORK,
    Emitter,
    Value,
)
from stages.engine.compiled.llvm.machine import Features
from stages.engine.compiled.llvm.vector_math import FLOAT_BITS, sizes_of_group
from stages.engine.compiled.steps import Field, Header
from stages.engine.quantisation.groups import GROUP

COLUMNS = 2  # blocks that are computed together, so that an input is loaded once for both
TILE = 6  # rows that share the unpacking of codes: the sums of all rows and blocks fit the 32 registers of AVX-512
NARROW_TILE = 2  # with 16 registers of half the size
CHAINS = 2  # sums of a group that are added at its end: a processor adds to several at a time
BYTES = 4 * VECTOR_SIZE  # of a vector
AHEAD = 2048  # bytes between what is multiplied and what is prefetched: a processor prefetches the next lines only


@dataclass(frozen=True)
class _Column:
    """Addresses of a block's codes, scales and minima."""

    codes: Value
    scales: Value
    minima: Value


@dataclass(frozen=True)
class ProductKind:
    """How a matrix is stored, and how its inputs are."""

    bits: int  # of a code: 4 or 8; of a number: 16 (bfloat16) or 32
    wide_scales: bool = False  # whether scales and minima have 32 bits instead of 16
    input_bits: int = FLOAT_BITS  # 32, or 16 or 8 if inputs are rounded, with one scale per group
    # whether the code in the middle stands for 0, and no minima are stored. Codes are signed numbers then, but
    # for inputs of 8 bits, with which processors multiply unsigned ones.
    signed: bool = False
    scales: int = 1  # per group and output: 1, or 2 of signed codes

    @property
    def name(self) -> str:
        """The name of its function."""
        wide, halves = self.wide_scales, self.scales == 2
        parts = {"signed": self.signed, "halves": halves, "wide": wide, f"inputs{self.input_bits}": self.rounds}
        return "_".join([f"product{self.bits}", *(part for part, applies in parts.items() if applies)])

    @property
    def rounds(self) -> bool:
        return self.input_bits < FLOAT_BITS

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
        self._group_bytes = kind.bits * GROUP * VECTOR_SIZE // 8
        self._scale_bytes = VECTOR_SIZE * (4 if kind.wide_scales else 2)
        self._ahead = AHEAD // self._group_bytes
        self._vectors = kind.bits * GROUP // 32 // kind.scales  # of codes that share a scale
        self._sums = [emit.variable(VECTOR, emit.floats(0.0)) for _ in range(COLUMNS * self._tile)]

    def emit_blocks(self) -> None:
        """Emit the loop over groups of blocks, and over tiles of rows within."""
        emit = self._emit
        rest = emit.remainder(self._rows, self._tile)
        whole = emit.subtract(self._rows, rest)
        with emit.loop(self._begin, self._end) as item:
            block = emit.multiply(item, COLUMNS)
            with emit.loop(0, whole, self._tile) as row:
                self._emit_tile(block, row, self._tile)
            emit.switch(rest, {rows: partial(self._emit_tile, block, whole, rows) for rows in range(1, self._tile)})

    def _emit_tile(self, block: Value, row: Value, rows: int) -> None:
        """Emit the sums of some rows and blocks over all groups, and their outputs."""
        emit, kind = self._emit, self._kind
        input_bytes, sum_bytes = sizes_of_group(kind.input_bits)
        columns = [self._find_column(emit.add(block, number)) for number in range(COLUMNS)]
        all_inputs, all_sums = emit.pointer(self._fields, Field.INPUTS), emit.pointer(self._fields, Field.INPUT_SUMS)
        starts = [emit.multiply(emit.add(row, number), self._groups) for number in range(rows)]
        inputs = [emit.offset(all_inputs, start, input_bytes) for start in starts]
        input_sums = [emit.offset(all_sums, start, sum_bytes) for start in starts]
        totals = [self._sums[number * self._tile :][:rows] for number in range(COLUMNS)]
        for total in chain(*totals):
            emit.set(total, emit.floats(0.0))
        with emit.loop(0, self._groups) as group:
            for column in columns if kind.bits < 32 else ():  # reading numbers of 32 bits takes all of the memory
                self._prefetch(column, emit.add(group, self._ahead))
            codes = [emit.offset(column.codes, group, self._group_bytes) for column in columns]
            own = [emit.offset(start, group, input_bytes) for start in inputs]
            multiply = self._multiply_codes if kind.rounds else self._multiply_numbers
            sums = [emit.offset(start, group, sum_bytes) for start in input_sums]
            for part in range(kind.scales):
                place = emit.add(emit.multiply(group, kind.scales), part)
                for column, own_totals, products in zip(columns, totals, multiply(codes, own, part), strict=True):
                    self._add_products(column, place, own_totals, products, sums, part)
        for number, own_totals in enumerate(totals):
            for place, total in enumerate(own_totals):
                self._store_outputs(emit.add(block, number), emit.add(row, place), emit.get(total, VECTOR))

    def _find_column(self, block: Value) -> "_Column":
        emit, first = self._emit, self._emit.multiply(block, self._groups)
        scales, minima = (
            emit.offset(emit.pointer(self._fields, field), emit.multiply(first, self._kind.scales), self._scale_bytes)
            for field in (Field.SCALES, Field.MINIMA)
        )
        return _Column(emit.offset(emit.pointer(self._fields, Field.MATRIX), first, self._group_bytes), scales, minima)

    def _prefetch(self, column: "_Column", group: Value) -> None:
        """Prefetch all that is stored of a group; after the last group of a block, that is the next block's."""
        emit, kind = self._emit, self._kind
        emit.prefetch(emit.offset(column.codes, group, self._group_bytes), self._group_bytes)
        if kind.has_groups:
            size = kind.scales * self._scale_bytes
            for address in (column.scales,) if kind.signed else (column.scales, column.minima):
                emit.prefetch(emit.offset(address, group, size), size)

    def _add_products(
        self,
        column: "_Column",
        place: Value,
        totals: Sequence[Value],
        products: Sequence[Value],
        sums: Sequence[Value],
        part: int,
    ) -> None:
        """Add the products of the codes that share the scale at a place with one block to the sums of all rows."""
        emit, kind = self._emit, self._kind
        if not kind.has_groups:
            for total, product in zip(totals, products, strict=True):
                emit.set(total, emit.builder.fadd(emit.get(total, VECTOR), product))
            return
        scale = self._load_scales(emit.offset(column.scales, place, self._scale_bytes))
        minimum = None
        if not kind.signed:
            minimum = self._load_scales(emit.offset(column.minima, place, self._scale_bytes))
        elif kind.input_bits == 8:
            minimum = emit.builder.fmul(scale, emit.floats(-float(1 << kind.bits - 1)))
        for total, product, own in zip(totals, products, sums, strict=True):
            self._add_group(total, product, scale, minimum, own, part)

    def _add_group(
        self, total: Value, product: Value, scale: Value, minimum: Value | None, sums: Value, part: int
    ) -> None:
        """Add a product, scaled, and the minimum, if there is one, times the inputs' sum."""
        emit = self._emit
        if self._kind.rounds:
            scale = emit.builder.fmul(scale, emit.spread(emit.load(sums, FLOAT)))
            sums = emit.offset(sums, 1 if self._kind.scales == 1 else 2 + part, 4)
        value = emit.multiply_add(product, scale, emit.get(total, VECTOR))
        if minimum is not None:
            value = emit.multiply_add(minimum, emit.spread(emit.load(sums, FLOAT)), value)
        emit.set(total, value)

    def _load_scales(self, address: Value) -> Value:
        emit = self._emit
        if self._kind.wide_scales:
            return emit.load(address, VECTOR, 64)
        return emit.builder.fpext(emit.load(address, ir.VectorType(HALF, VECTOR_SIZE), 32), VECTOR)

    def _store_outputs(self, block: Value, row: Value, outputs: Value) -> None:
        """Add the bias, multiply by the factor, add what the outputs are added to, and store them."""
        emit, build = self._emit, self._emit.builder
        place = emit.add(emit.multiply(row, emit.field(self._fields, Field.STRIDE)), emit.multiply(block, VECTOR_SIZE))
        address = emit.offset(emit.pointer(self._fields, Field.OUTPUTS), place, 4)
        value = emit.variable(VECTOR, emit.floats(0.0))
        emit.set(value, outputs)
        bias = emit.field(self._fields, Field.BIAS)
        with build.if_then(build.icmp_signed("!=", bias, emit.long(0))):
            own = emit.load(emit.offset(build.inttoptr(bias, POINTER), emit.multiply(block, VECTOR_SIZE), 4), VECTOR)
            emit.set(value, build.fadd(emit.get(value, VECTOR), own))
        factor = build.bitcast(build.trunc(emit.field(self._fields, Field.FACTOR), INT), FLOAT)
        emit.set(value, build.fmul(emit.get(value, VECTOR), emit.spread(factor)))
        with build.if_then(build.icmp_signed("!=", emit.field(self._fields, Field.ADDS), emit.long(0))):
            emit.set(value, build.fadd(emit.load(address, VECTOR), emit.get(value, VECTOR)))
        emit.store(emit.get(value, VECTOR), address)

    def _multiply_numbers(self, columns: Sequence[Value], inputs: Sequence[Value], part: int) -> list[list[Value]]:
        """Return, per block and row, the products of weights or codes of a group's part with the inputs, in float32."""
        emit = self._emit
        unpacked = [self._unpack_numbers(codes, part) for codes in columns]
        chains: list[list[list[Value]]] = [[[] for _ in inputs] for _ in columns]
        for own in zip(*unpacked, strict=True):
            for row, start in enumerate(inputs):
                value = emit.spread(emit.load(emit.offset(start, own[0][0], 4), FLOAT))
                for (_, weights), rows in zip(own, chains, strict=True):
                    sums = rows[row]
                    if len(sums) < CHAINS:
                        sums.append(emit.builder.fmul(weights, value))
                    else:  # the oldest comes next
                        sums.append(emit.multiply_add(weights, value, sums.pop(0)))
        return [[emit.builder.fadd(*sums) for sums in rows] for rows in chains]

    def _unpack_numbers(self, codes: Value, part: int) -> Sequence[tuple[int, Value]]:
        """Yield the number of every input of a group's part and its weights or codes as a vector of float32."""
        emit, bits = self._emit, self._kind.bits
        if bits == 32:
            return [(place, emit.load(emit.offset(codes, place, BYTES), VECTOR, 64)) for place in range(GROUP)]
        if bits == 16:
            return [(place, self._widen(emit.offset(codes, place, BYTES // 2))) for place in range(GROUP)]
        unpacked = []
        for vector in self._list_vectors(part):
            packed = emit.load(emit.offset(codes, vector, BYTES), INTS, 64)
            places = range(32 // bits)
            unpacked += [(_input_of(vector, place, bits), self._number_code(packed, place)) for place in places]
        return unpacked

    def _list_vectors(self, part: int) -> range:
        return range(part * self._vectors, (part + 1) * self._vectors)

    def _widen(self, address: Value) -> Value:
        """Load numbers of bfloat16: the high halves of float32."""
        emit = self._emit
        short = emit.load(address, ir.VectorType(ir.IntType(16), VECTOR_SIZE), 32)
        return emit.builder.bitcast(emit.builder.shl(emit.builder.zext(short, INTS), emit.ints(16)), VECTOR)

    def _number_code(self, packed: Value, place: int) -> Value:
        """Return the codes at a place of each packed number as float32."""
        emit, build, bits, signed = self._emit, self._emit.builder, self._kind.bits, self._kind.signed
        if bits == 4 and self._features.wide_registers:  # by the lowest four bits of each index
            shifted = build.lshr(packed, emit.ints(place * bits)) if place else packed
            codes = [code - 16 if signed and code > 7 else code for code in range(VECTOR_SIZE)]
            table = ir.Constant(VECTOR, list(map(float, codes)))
            return emit.call("llvm.x86.avx512.permvar.sf.512", VECTOR, [table, shifted])
        raised = build.shl(packed, emit.ints(32 - bits * (place + 1)))
        if signed:
            return build.sitofp(build.ashr(raised, emit.ints(32 - bits)), VECTOR)
        return build.uitofp(build.lshr(raised, emit.ints(32 - bits)), VECTOR)

    def _multiply_codes(self, columns: Sequence[Value], inputs: Sequence[Value], part: int) -> list[list[Value]]:
        """Return, per block and row, the products of a part's codes with the rounded inputs: sums of integers."""
        emit, input_bits = self._emit, self._kind.input_bits
        unpacked = [self._unpack_codes(codes, part) for codes in columns]
        totals: list[list[Value]] = [[emit.ints(0) for _ in inputs] for _ in columns]
        first = part * GROUP * input_bits // 32 // self._kind.scales
        for number, own in enumerate(zip(*unpacked, strict=True), first):
            for row, start in enumerate(inputs):
                few = emit.spread(emit.load(emit.offset(start, number, 4), INT))
                for taken, sums in zip(own, totals, strict=True):
                    sums[row] = self._features.add_dot(emit, sums[row], taken, few, input_bits)
        return [[emit.builder.sitofp(total, VECTOR) for total in sums] for sums in totals]

    def _unpack_codes(self, codes: Value, part: int) -> list[Value]:
        """Return, per two or four inputs of a group's part, as many codes of an input's bits for each output."""
        emit, kind = self._emit, self._kind
        take = self._take_signed if kind.signed and kind.input_bits == 16 else self._take_unsigned
        vectors = [emit.load(emit.offset(codes, vector, BYTES), INTS, 64) for vector in self._list_vectors(part)]
        return [take(packed, place) for packed in vectors for place in range(kind.input_bits // kind.bits)]

    def _take_unsigned(self, packed: Value, place: int) -> Value:
        emit, bits, input_bits = self._emit, self._kind.bits, self._kind.input_bits
        shifted = emit.builder.lshr(packed, emit.ints(place * bits)) if place else packed
        mask = sum((1 << bits) - 1 << begin for begin in range(0, 32, input_bits))
        return shifted if bits == input_bits else emit.builder.and_(shifted, emit.ints(mask))

    def _take_signed(self, packed: Value, place: int) -> Value:
        build, bits = self._emit.builder, self._kind.bits
        kind = ir.VectorType(ir.IntType(16), 2 * VECTOR_SIZE)
        halves = build.shl(build.bitcast(packed, kind), ir.Constant(kind, [16 - bits * (place + 1)] * kind.count))
        return build.bitcast(build.ashr(halves, ir.Constant(kind, [16 - bits] * kind.count)), INTS)


def _input_of(vector: int, part: int, bits: int) -> int:
    """Return which input of a group the code at a place of a packed vector belongs to (`packing.py`).

    Of the inputs of a number of 32 bits, the even ones are in its low half and the odd ones in its high half.

    >>> [_input_of(1, part, 4) for part in range(8)]
    [8, 10, 12, 14, 9, 11, 13, 15]
    """
    half = 16 // bits
    return 2 * half * vector + 2 * (part % half) + part // half
