"""Writes functions in LLVM's intermediate representation, one operation after the other.

A method emits an operation and returns its value; nothing is computed before the module is compiled and run. Only what
the kernels of this folder need is here: loops, integers of 64 bits, and vectors of `VECTOR_SIZE` numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

VECTOR_SIZE = 16  # numbers of a vector; LLVM divides it where registers are smaller
BYTE, INT, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT, HALF = ir.FloatType(), ir.HalfType()
POINTER = ir.PointerType()
LINE = 64  # bytes that a processor reads from memory at once
VECTOR, INTS = ir.VectorType(FLOAT, VECTOR_SIZE), ir.VectorType(INT, VECTOR_SIZE)
WORK = (POINTER, POINTER, LONG, LONG, LONG)  # arguments of a step: itself, the header, first and end of items, thread

Value = Any  # a value of llvmlite, which has no annotations


class Emitter:
    """Emits one function of a module. It has arguments of these types and returns nothing."""

    def __init__(self, module: ir.Module, name: str, arguments: Sequence[Any]) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), list(arguments)), name)
        self.module, self.arguments, self.name = module, function.args, name
        self._entry = function.append_basic_block("entry")
        self.builder = ir.IRBuilder(function.append_basic_block("body"))
        self._function = function

    def finish(self) -> None:
        """End the function and join its first block to the others."""
        self.builder.ret_void()
        ir.IRBuilder(self._entry).branch(self._function.basic_blocks[1])

    def long(self, value: int) -> Value:
        return ir.Constant(LONG, value)

    def floats(self, value: float) -> Value:
        return ir.Constant(VECTOR, [value] * VECTOR_SIZE)

    def ints(self, value: int) -> Value:
        return ir.Constant(INTS, [value] * VECTOR_SIZE)

    def add(self, left: Value, right: Value | int) -> Value:
        return self.builder.add(left, self._as_long(right))

    def subtract(self, left: Value, right: Value | int) -> Value:
        return self.builder.sub(left, self._as_long(right))

    def multiply(self, left: Value, right: Value | int) -> Value:
        return self.builder.mul(left, self._as_long(right))

    def divide(self, left: Value, right: Value | int) -> Value:
        """Divide integers that are not negative, rounded down."""
        return self.builder.udiv(left, self._as_long(right))

    def smaller(self, left: Value, right: Value | int) -> Value:
        right = self._as_long(right)
        return self.builder.select(self.builder.icmp_signed("<", left, right), left, right)

    def remainder(self, left: Value, right: Value | int) -> Value:
        return self.builder.urem(left, self._as_long(right))

    def _as_long(self, value: Value | int) -> Value:
        return self.long(value) if isinstance(value, int) else value

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: Value | int = 1) -> Iterator[Value]:
        """Emit the body of a `with` block as a loop over a range; yields the index."""
        before, index = self.builder.block, None
        head, body, after = (self._function.append_basic_block(part) for part in ("head", "loop", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.phi(LONG)
        index.add_incoming(self._as_long(start), before)
        self.builder.cbranch(self.builder.icmp_signed("<", index, self._as_long(stop)), body, after)
        self.builder.position_at_end(body)
        yield index
        index.add_incoming(self.add(index, step), self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def repeat(self) -> Iterator[Callable[[Value], None]]:
        """Emit the body of a `with` block as a loop without end; yields what ends it where a condition holds."""
        body, after = (self._function.append_basic_block(part) for part in ("repeat", "after"))
        self.builder.branch(body)
        self.builder.position_at_end(body)

        def stop(holds: Value) -> None:
            further = self._function.append_basic_block("further")
            self.builder.cbranch(holds, after, further)
            self.builder.position_at_end(further)

        yield stop
        self.builder.branch(body)
        self.builder.position_at_end(after)

    def switch(self, value: Value, cases: dict[int, Callable[[], None]]) -> None:
        """Emit what each value of an integer leads to; other values lead to nothing."""
        after = self._function.append_basic_block("after")
        switch = self.builder.switch(value, after)
        for number, emit in cases.items():
            block = self._function.append_basic_block(f"case{number}")
            switch.add_case(number, block)
            self.builder.position_at_end(block)
            emit()
            self.builder.branch(after)
        self.builder.position_at_end(after)

    def variable(self, kind: Any, value: Value) -> Value:
        """Return the address of a variable of a type with this value."""
        address = ir.IRBuilder(self._entry).alloca(kind)
        self.builder.store(value, address)
        return address

    def reserve(self, vectors: int) -> Value:
        """Return the address of memory for some vectors, with nothing in it."""
        entry = ir.IRBuilder(self._entry)
        address = entry.alloca(ir.ArrayType(VECTOR, vectors))
        return entry.inttoptr(entry.ptrtoint(address, LONG), POINTER)  # forgets the type

    def get(self, variable: Value, kind: Any) -> Value:
        return self.builder.load(variable, typ=kind)

    def set(self, variable: Value, value: Value) -> None:
        self.builder.store(value, variable)

    def offset(self, address: Value, count: Value | int, size: int) -> Value:
        """Return an address that is so many elements of a size in bytes further."""
        return self.builder.gep(address, [self.multiply(self._as_long(count), size)], source_etype=BYTE)

    def load(self, address: Value, kind: Any, align: int = 4) -> Value:
        return self.builder.load(address, typ=kind, align=align)

    def store(self, value: Value, address: Value, align: int = 4) -> None:
        self.builder.store(value, address, align=align)

    def prefetch(self, address: Value, size: int) -> None:
        """Prefetch the bytes at an address, which are read soon. It may be outside of what the process may read."""
        arguments = [ir.Constant(INT, number) for number in (0, 3, 1)]  # to be read, often, as data
        for place in range(0, size, LINE):
            self.call("llvm.prefetch.p0", ir.VoidType(), [self.offset(address, place, 1), *arguments])

    def field(self, table: Value, number: int) -> Value:
        return self.load(self.offset(table, number, 8), LONG, 8)

    def pointer(self, table: Value, number: int) -> Value:
        """Return an integer of a table as an address."""
        return self.builder.inttoptr(self.field(table, number), POINTER)

    def spread(self, number: Value) -> Value:
        kind = ir.VectorType(number.type, VECTOR_SIZE)
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(nothing, number, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(first, nothing, self.ints(0))

    def call(self, name: str, kind: Any, arguments: Sequence[Value]) -> Value:
        """Call an intrinsic or another function by its name."""
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(kind, [argument.type for argument in arguments]), name)
        return self.builder.call(function, arguments)

    def multiply_add(self, left: Value, right: Value, addend: Value) -> Value:
        """Return `left * right + addend` of vectors, rounded once."""
        return self.call(f"llvm.fma.v{VECTOR_SIZE}f32", VECTOR, [left, right, addend])

    def total(self, vector: Value) -> Value:
        """Return the sum of a vector, added in a fixed order: halves, quarters and so on."""
        while vector.type.count > 1:
            half = vector.type.count // 2
            nothing = ir.Constant(vector.type, ir.Undefined)
            low, high = (
                self.builder.shuffle_vector(vector, nothing, ir.Constant(ir.VectorType(INT, half), list(part)))
                for part in (range(half), range(half, 2 * half))
            )
            is_float = vector.type.element == FLOAT
            vector = self.builder.fadd(low, high) if is_float else self.builder.add(low, high)
        return self.builder.extract_element(vector, ir.Constant(INT, 0))

    def totals(self, vectors: Sequence[Value]) -> Value:
        """Return the sums of `VECTOR_SIZE` vectors as one vector; each is added in the order of `total`.

        Two vectors become one with the sums of the halves of both, and so on.
        """
        size = VECTOR_SIZE
        while len(vectors) > 1:
            half = size // 2
            low = [start + place for start in range(0, 2 * VECTOR_SIZE, size) for place in range(half)]
            orders = [ir.Constant(INTS, [place + shift for place in low]) for shift in (0, half)]
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [
                self.builder.fadd(*(self.builder.shuffle_vector(*pair, order) for order in orders)) for pair in pairs
            ]
            size = half
        return vectors[0]
