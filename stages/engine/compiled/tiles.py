"""Products of 16 rows with the unpacked codes of a group, by a processor's tiles (AMX).

A tile of inputs has the bytes of some inputs, a row for each row; a tile of codes has four inputs of all outputs in a
row, as they are unpacked (`codes.py`). Their product has a row of 16 sums of integers for each row, the same as those
of single instructions. It leaves the tiles by way of memory, which takes 16 cycles however many rows it has: so fewer
rows are multiplied without tiles.
"""

from llvmlite import ir

from stages.engine.compiled.llvm.emitter import BYTE, INTS, LINE, VECTOR_SIZE, Emitter, Value
from stages.engine.quantisation.groups import GROUP
from stages.engine.quantisation.layouts import VECTORS, WORD

ROWS = 16  # of a tile
PRODUCTS, INPUTS, CODES = (0, 1, 2, 3), (4, 5), (6, 7)  # numbers of the tiles
BEHIND = 2  # groups whose products are kept: one is computed while those of the one before are read


class TileProducts:
    """Emits the products of a group. It has one scale or two, each of a part of its inputs; inputs have one or two
    planes of bytes.
    """

    def __init__(self, emit: Emitter, parts: int, planes: int) -> None:
        self._emit, self._parts, self._planes = emit, parts, planes
        self._inputs = GROUP // parts  # of a part
        self._shapes = emit.reserve(1)
        self._products = emit.reserve(BEHIND * parts * planes * ROWS)

    def configure(self) -> None:
        """Emit what gives the tiles of a thread their shapes: a palette, bytes of a row and rows of each tile."""
        table = bytearray(LINE)
        table[0] = 1
        for tile in (*PRODUCTS, *INPUTS, *CODES):
            table[16 + 2 * tile] = self._inputs if tile in INPUTS else LINE
            table[48 + tile] = self._inputs // WORD if tile in CODES else ROWS
        words = [int.from_bytes(table[place : place + 4], "little", signed=True) for place in range(0, LINE, 4)]
        self._emit.store(ir.Constant(INTS, words), self._shapes, LINE)
        self._call("ldtilecfg", self._shapes)

    def release(self) -> None:
        """Emit the end of all tiles, which an operating system would keep for a thread else."""
        self._call("tilerelease")

    def multiply(self, codes: Value, inputs: Value, stride: Value, group: Value) -> None:
        """Emit the products of a group. `codes` and `inputs` are the addresses of the first group's, `stride` the bytes
        from one row's inputs to the next one's.
        """
        emit, size = self._emit, self._planes * GROUP
        for part in range(self._parts):
            own = emit.add(emit.multiply(group, VECTORS), part * VECTORS // self._parts)
            self._load(CODES[part], emit.offset(codes, own, LINE), emit.long(LINE))
            for plane in range(self._planes):
                product, place = PRODUCTS[2 * part + plane], plane * GROUP + part * self._inputs
                self._load(INPUTS[plane], emit.offset(inputs, emit.add(emit.multiply(group, size), place), 1), stride)
                self._call("tilezero", _tile(product))
                self._call("tdpbsud", _tile(product), _tile(INPUTS[plane]), _tile(CODES[part]))
                self._call("tilestored64", _tile(product), self._place(group, part, plane), emit.long(LINE))

    def read(self, group: Value, part: int, row: int) -> list[Value]:
        """Return a row's sums with a part of a group, one of each plane of bytes."""
        places = (self._place(group, part, plane) for plane in range(self._planes))
        return [self._emit.load(self._emit.offset(place, row, LINE), INTS, LINE) for place in places]

    def _place(self, group: Value, part: int, plane: int) -> Value:
        emit = self._emit
        number = emit.multiply(emit.builder.and_(group, emit.long(BEHIND - 1)), self._parts * self._planes)
        return emit.offset(self._products, emit.add(number, part * self._planes + plane), ROWS * 4 * VECTOR_SIZE)

    def _load(self, tile: int, address: Value, stride: Value) -> None:
        self._call("tileloadd64", _tile(tile), address, stride)

    def _call(self, name: str, *arguments: Value) -> None:
        self._emit.call(f"llvm.x86.{name}", ir.VoidType(), arguments)


def _tile(number: int) -> Value:
    return ir.Constant(BYTE, number)
