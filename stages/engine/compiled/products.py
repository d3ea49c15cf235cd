"""Products of a few rows with a matrix, from its stored form: codes in groups, or numbers of 16 or 32 bits.

A block of `VECTOR_SIZE` outputs is computed at once, one output per number of a vector. A vector holds codes of the
same four inputs of all outputs (`codes.py`), or the numbers of one input: they are unpacked once for up to `MOST` rows.
Of a group, a row's sum is `scale * ((codes - middle) . inputs) + minimum * (sum of the inputs)`.

The sums of a row are added in the same order for every number of rows, so a row has the same bits alone and in any
batch. With inputs of 16 or 8 bits the products of a group are sums of integers, four at a time. A processor multiplies
bytes: an input of 16 bits is two of them, whose sums are joined.

Shapes: N rows, O outputs, I inputs, B blocks of outputs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from stages.engine.compiled.codes import FLIP, Block
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
from stages.engine.compiled.llvm.vector_math import FLOAT_BITS, InputSum, sizes_of_group
from stages.engine.compiled.steps import Field, Header
from stages.engine.compiled.tiles import ROWS, TileProducts
from stages.engine.quantisation.groups import GROUP
from stages.engine.quantisation.layouts import CODE_TYPES, VECTORS, WORD, CodeType, Group

TILE = 4  # rows that share a load of unpacked codes; six and eight are slower (benchmarks/notes/passes.md)
NARROW_TILE = 2  # with 16 registers of half the size
MOST = 96  # rows whose sums are kept, while a part of the inputs is unpacked once for them
STEP = 8  # groups that are unpacked, and then multiplied with all rows
BYTES = 4 * VECTOR_SIZE  # of a vector
# How many groups ahead of those that are multiplied others are prefetched, in the order of the memory: 8 ahead, its
# answers come too late (benchmarks/notes/passes.md).
GROUPS_AHEAD = 3 * STEP
CHAINS = 2  # sums of a group that are added at its end: a processor adds to several at a time
AHEAD = 4096  # bytes between numbers that are multiplied and those that are prefetched
NUMBER_BITS = {"BF16": 16, "F16": 16, "F32": 32}


@dataclass(frozen=True)
class ProductKind:
    """How a matrix is stored, and how its inputs are."""

    form: str  # a key of `CODE_TYPES` or `NUMBER_BITS`
    input_bits: int = FLOAT_BITS  # 32, or 16 or 8 if inputs are rounded, with one scale per group

    @property
    def name(self) -> str:
        """The name of its function."""
        return f"product_{self.form}_{self.input_bits}"

    @property
    def codes(self) -> CodeType | None:
        return CODE_TYPES.get(self.form)

    @property
    def bits(self) -> int:
        """Bits of a code or number."""
        return NUMBER_BITS[self.form] if self.codes is None else self.codes.bits

    @property
    def rounds(self) -> bool:
        return self.input_bits < FLOAT_BITS

    @property
    def has_groups(self) -> bool:
        """Whether it has codes."""
        return self.codes is not None

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the words or numbers and of the scales of a packed block."""
        if self.codes is None:
            return GROUP * VECTOR_SIZE * self.bits // 8, 0
        return self.codes.words * WORD * VECTOR_SIZE, self.codes.scale_bytes * VECTOR_SIZE


def emit_product(module: ir.Module, kind: ProductKind, features: Features) -> None:
    """Define the function of a kind of products; its items are blocks of outputs."""
    emit = Emitter(module, kind.name, WORK)
    _Product(emit, kind, features).emit_blocks()
    emit.finish()


@dataclass(frozen=True)
class _Part:
    """What is computed of a product at a time."""

    block: Value
    first: Value  # the first row
    begin: Value  # the first group
    groups: Value  # how many: at most `STEP`


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
        self._scales, self._middle = (kind.codes.parts, kind.codes.middle) if kind.codes else (0, 0)
        # Codes of 8 bits minus 128 are signed bytes, with a middle as much lower.
        self._flips = features.signed and kind.rounds and 8 in (kind.bits, self._middle.bit_length())
        self._centre = self._middle - 128 * self._flips
        fields = zip((Field.MATRIX, Field.SCALES), kind.sizes, strict=True)
        self._stored = [(emit.pointer(step, field), size) for field, size in fields]  # and the bytes of a packed block
        self._inputs, self._input_sums = (emit.pointer(step, field) for field in (Field.INPUTS, Field.INPUT_SUMS))
        self._totals = emit.reserve(MOST)
        # What is unpacked: the codes of `STEP` groups, and their scales and minima.
        self._factors = self._scales if self._middle else 2 * self._scales  # of a group
        self._codes, self._scales_and_minima = (emit.reserve(STEP * count) for count in (VECTORS, self._factors))
        self._tiles: TileProducts | None = None
        if kind.rounds and kind.has_groups and features.tiles:
            self._tiles = TileProducts(emit, self._scales, kind.input_bits // 8)

    def emit_blocks(self) -> None:
        """Emit the loop over blocks, and over some rows within."""
        emit = self._emit
        enough = emit.builder.icmp_signed(">=", self._rows, emit.long(ROWS))
        if self._tiles is not None:
            with emit.builder.if_then(enough):
                self._tiles.configure()
        with emit.loop(self._begin, self._end) as block, emit.loop(0, self._rows, MOST) as first:
            self._emit_rows(block, first, emit.smaller(emit.subtract(self._rows, first), MOST))
        if self._tiles is not None:
            with emit.builder.if_then(enough):
                self._tiles.release()

    def _emit_rows(self, block: Value, first: Value, count: Value) -> None:
        """Emit the sums of some rows over all groups of a block, and their outputs."""
        emit = self._emit
        with emit.loop(0, count) as row:
            emit.store(emit.floats(0.0), emit.offset(self._totals, row, BYTES), 64)
        with emit.loop(0, self._groups, STEP) as begin:
            part = _Part(block, first, begin, emit.smaller(emit.subtract(self._groups, begin), STEP))
            self._unpack(part)
            self._emit_part(part, count)
        with emit.loop(0, count) as row:
            total = emit.load(emit.offset(self._totals, row, BYTES), VECTOR, 64)
            self._store_outputs(block, emit.add(first, row), total)

    def _place_group(self, memory: Value, group: Value, size: int) -> Value:
        """Return where so many vectors of an unpacked group are."""
        return self._emit.offset(memory, self._emit.multiply(group, size), BYTES)

    def _number_group(self, part: _Part, group: Value | int = 0) -> Value:
        """Return the number of a group of a part among those of all blocks."""
        emit = self._emit
        return emit.add(emit.add(emit.multiply(part.block, self._groups), part.begin), group)

    def _unpack(self, part: _Part) -> None:
        """Emit the unpacking of some groups."""
        emit, kind = self._emit, self._kind.codes
        if kind is None:
            return
        first = emit.divide(self._number_group(part), kind.groups)
        with emit.loop(0, emit.divide(part.groups, kind.groups)) as place:
            for number, own in enumerate(self._read_block(kind, emit.add(first, place))):
                group = emit.add(emit.multiply(place, kind.groups), number)
                codes = [emit.builder.xor(one, emit.ints(FLIP)) for one in own.codes] if self._flips else own.codes
                self._store(self._place_group(self._codes, group, VECTORS), codes)
                factors = [*own.scales, *own.minima]
                self._store(self._place_group(self._scales_and_minima, group, self._factors), factors)

    def _store(self, start: Value, vectors: Sequence[Value]) -> None:
        for number, vector in enumerate(vectors):
            self._emit.store(vector, self._emit.offset(start, number, BYTES), 64)

    def _read_block(self, kind: CodeType, number: Value) -> Iterator[Group]:
        """Yield the groups of a packed block."""
        words, scales = (self._emit.offset(address, number, size) for address, size in self._stored)
        yield from kind.unpack(Block(self._emit, words, scales, kind.scale_size, self._features))

    def _find_next(self, part: _Part) -> list[tuple[Value, int]]:
        """Return where the words and scales begin that are prefetched group by group while a part is multiplied, and
        the bytes that a group has of them. Behind the last group of a block are those of the next one.
        """
        kind = self._kind.codes
        if kind is None:
            return []
        number = self._number_group(part, GROUPS_AHEAD)
        sizes = [(start, size // kind.groups) for start, size in self._stored]
        return [(self._emit.offset(start, number, size), size) for start, size in sizes]

    def _emit_part(self, part: _Part, count: Value) -> None:
        """Emit the products of some groups of a block, added to the sums of all rows: of 16 by tiles, then `TILE`."""
        emit, done = self._emit, self._emit.long(0)
        if self._tiles is not None:
            done = emit.subtract(count, emit.remainder(count, ROWS))
            with emit.loop(0, done, ROWS) as row:
                self._emit_few(part, row, ROWS, self._tiles)
        rest = emit.remainder(emit.subtract(count, done), self._tile)
        whole = emit.subtract(count, rest)
        with emit.loop(done, whole, self._tile) as row:
            self._emit_few(part, row, self._tile)
        few = range(1, self._tile)
        emit.switch(rest, {rows: partial(self._emit_few, part, whole, rows) for rows in few})

    def _emit_few(self, part: _Part, row: Value, rows: int, tiles: TileProducts | None = None) -> None:
        """Emit the products of some groups of a block, added to the sums of some rows, perhaps by tiles."""
        emit = self._emit
        input_bytes, sum_bytes = sizes_of_group(self._kind.input_bits)
        numbers = [emit.add(row, number) for number in range(rows)]
        starts = [emit.add(emit.multiply(emit.add(part.first, one), self._groups), part.begin) for one in numbers]
        addresses = [emit.offset(self._totals, number, BYTES) for number in numbers]
        totals = [emit.variable(VECTOR, emit.floats(0.0)) for _ in numbers]
        for total, address in zip(totals, addresses, strict=True):
            emit.set(total, emit.load(address, VECTOR, 64))
        block = self._codes, emit.offset(self._inputs, starts[0], input_bytes), emit.multiply(self._groups, input_bytes)
        if tiles:
            tiles.multiply(*block, emit.long(0))
        follows = self._find_next(part)
        with emit.loop(0, part.groups) as group:
            with emit.builder.if_then(emit.builder.icmp_signed("==", row, emit.long(0))):
                for address, size in follows:
                    emit.prefetch(emit.offset(address, group, size), size)
            if tiles:
                following = emit.add(group, 1)
                with emit.builder.if_then(emit.builder.icmp_signed("<", following, part.groups)):
                    tiles.multiply(*block, following)
            inputs = [emit.offset(self._inputs, emit.add(start, group), input_bytes) for start in starts]
            sums = [emit.offset(self._input_sums, emit.add(start, group), sum_bytes) for start in starts]
            if self._kind.has_groups:
                own = self._load_group(group)
                products: Callable[[int], Iterable[Value]]
                if tiles:
                    products = partial(self._read_tiles, tiles, group, sums)
                elif self._kind.rounds:
                    products = partial(self._multiply_rounded, own, inputs, sums)
                else:
                    products = partial(self._multiply_codes, own, inputs)
                self._add_group(totals, own, sums, products)
            else:
                self._add_numbers(totals, self._number_group(part, group), inputs)
        for total, address in zip(totals, addresses, strict=True):
            emit.store(emit.get(total, VECTOR), address, 64)

    def _load_group(self, group: Value) -> Group:
        codes, factors = (
            self._load(self._place_group(memory, group, count), form, count)
            for memory, count, form in ((self._codes, VECTORS, INTS), (self._scales_and_minima, self._factors, VECTOR))
        )
        return Group(codes, factors[: self._scales], factors[self._scales :])

    def _load(self, start: Value, form: ir.Type, count: int) -> list[Value]:
        return [self._emit.load(self._emit.offset(start, number, BYTES), form, 64) for number in range(count)]

    def _add_numbers(self, totals: Sequence[Value], number: Value, inputs: Sequence[Value]) -> None:
        """Add the products of a group of numbers in the matrix to the sums of all rows."""
        emit = self._emit
        matrix, size = self._stored[0]
        start = emit.offset(matrix, number, size)
        if self._kind.bits < 32:  # reading numbers of 32 bits takes all of the memory
            emit.prefetch(emit.offset(start, AHEAD, 1), size)
        weights = (self._read_numbers(start, place) for place in range(GROUP))
        for total, product in zip(totals, self._multiply_numbers(weights, 0, inputs), strict=True):
            emit.set(total, emit.builder.fadd(emit.get(total, VECTOR), product))

    def _read_numbers(self, numbers: Value, place: int) -> Value:
        """Return the weights of an input as float32; those of BF16 are the high halves."""
        emit = self._emit
        if self._kind.bits == 32:
            return emit.load(emit.offset(numbers, place * VECTOR_SIZE, 4), VECTOR, 64)
        halves = self._kind.form == "F16"
        kind = ir.VectorType(HALF if halves else ir.IntType(16), VECTOR_SIZE)
        short = emit.load(emit.offset(numbers, place * VECTOR_SIZE, 2), kind, 32)
        if halves:
            return emit.builder.fpext(short, VECTOR)
        return emit.builder.bitcast(emit.builder.shl(emit.builder.zext(short, INTS), emit.ints(16)), VECTOR)

    def _add_group(
        self, totals: Sequence[Value], group: Group, sums: Sequence[Value], products: Callable[[int], Iterable[Value]]
    ) -> None:
        """Add the products of a group, by its parts, to the sums of all rows. `sums` has the address of what is known
        of each row's inputs of the group, see `InputSum`.
        """
        for part in range(self._scales):
            for total, product, own in zip(totals, products(part), sums, strict=True):
                self._emit.set(total, self._add_product(group, part, product, own, self._emit.get(total, VECTOR)))

    def _add_product(self, group: Group, part: int, product: Value, sums: Value, total: Value) -> Value:
        """Return a row's total plus its product with the codes of a group's part."""
        emit, scale = self._emit, group.scales[part]
        if self._kind.rounds:
            scale = emit.builder.fmul(scale, self._spread(sums, InputSum.SCALE, FLOAT))
        value = emit.multiply_add(product, scale, total)
        if group.minima:
            own = self._spread(sums, InputSum.SUM + self._number_sum(part), FLOAT)
            value = emit.multiply_add(group.minima[part], own, value)
        return value

    def _number_sum(self, part: int) -> int:
        """Return which of the inputs' sums is that of a group's part."""
        return 0 if self._scales == 1 else 1 + part

    def _find_centre(self, part: int, sums: Value) -> Value:
        """Return what is added to a row's products of codes for their middle."""
        if not self._centre:
            return self._emit.ints(0)
        minus = self._spread(sums, InputSum.MINUS_CODES + self._number_sum(part), INT)
        return self._emit.builder.mul(minus, self._emit.ints(self._centre))

    def _join_sums(self, low: Value, high: Value | None = None) -> Value:
        """Return in float32 the products of inputs, given those of their lower bytes and those of their higher ones."""
        build = self._emit.builder
        total = low if high is None else build.add(low, build.shl(high, self._emit.ints(8)))
        return build.sitofp(total, VECTOR)

    def _spread(self, start: Value, number: int, kind: ir.Type) -> Value:
        return self._emit.spread(self._emit.load(self._emit.offset(start, number, 4), kind))

    def _read_tiles(self, tiles: TileProducts, group: Value, sums: Sequence[Value], part: int) -> Iterator[Value]:
        """Yield each row's products with the codes of a group's part, in float32, which tiles have computed."""
        for row, own in enumerate(sums):
            low, *high = tiles.read(group, part, row)
            yield self._join_sums(self._emit.builder.add(low, self._find_centre(part, own)), *high)

    def _multiply_rounded(self, group: Group, inputs: Sequence[Value], sums: Sequence[Value], part: int) -> list[Value]:
        """Return each row's products with the codes of a group's part: sums of integers, in float32."""
        emit, size = self._emit, VECTORS // self._scales
        planes = range(self._kind.input_bits // 8)
        totals = [[emit.ints(0) if plane else self._find_centre(part, own) for plane in planes] for own in sums]
        for number in range(part * size, (part + 1) * size):
            for start, own in zip(inputs, totals, strict=True):
                for plane in planes:
                    few = self._spread(start, plane * VECTORS + number, INT)
                    own[plane] = self._features.add_dot(emit, own[plane], group.codes[number], few)
        return [self._join_sums(*own) for own in totals]

    def _multiply_codes(self, group: Group, inputs: Sequence[Value], part: int) -> Iterator[Value]:
        """Yield each row's products with the codes of a group's part, in float32."""
        size = GROUP // self._scales
        numbers = range(part * size, (part + 1) * size)
        weights = (self._number_code(group, number) for number in numbers)
        return self._multiply_numbers(weights, numbers[0], inputs)

    def _multiply_numbers(self, weights: Iterable[Value], first: int, inputs: Sequence[Value]) -> Iterator[Value]:
        """Yield each row's products with the weights of consecutive inputs."""
        emit = self._emit
        chains: list[list[Value]] = [[] for _ in inputs]
        for number, weight in enumerate(weights, first):
            for start, own in zip(inputs, chains, strict=True):
                value = self._spread(start, number, FLOAT)
                if len(own) < CHAINS:
                    own.append(emit.builder.fmul(weight, value))
                else:  # the oldest comes next
                    own.append(emit.multiply_add(weight, value, own.pop(0)))
        for own in chains:
            yield emit.builder.fadd(*own)

    def _number_code(self, group: Group, number: int) -> Value:
        """Return the codes of an input in float32."""
        emit, (vector, place) = self._emit, divmod(number, WORD)
        shifted = emit.builder.lshr(group.codes[vector], emit.ints(8 * place))
        code = emit.builder.and_(shifted, emit.ints(255))
        return emit.builder.sitofp(emit.builder.sub(code, emit.ints(self._middle)), VECTOR)

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
