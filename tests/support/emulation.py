"""Compiled steps of AArch64, run by an emulator: QEMU's, with a compiler of C for that processor to link them.

A pass is a file: its table, its header and the memory that they have addresses of. The emulated program maps it at a
fixed address, runs the pass and leaves what that has written.
"""

import ctypes
import gc
import shutil
import subprocess
from array import array
from bisect import bisect_right
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from llvmlite import ir

from stages.engine.compiled.llvm.emitter import LINE
from stages.engine.compiled.llvm.machine import ARM_FEATURES, NEON, Features, optimise_module
from stages.engine.compiled.products import ProductKind
from stages.engine.compiled.program import CompiledSteps, Integers
from stages.engine.compiled.shape import ModelShape
from stages.engine.compiled.steps import COUNTERS, Field, Header, StepKind

TRIPLE = "aarch64-unknown-linux-gnu"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
BASE = 1 << 36  # address of the memory
PROGRAM = """
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
void run(void *);
int main(int count, char **arguments) {
    struct stat found;
    int file = open(arguments[1], O_RDWR);
    void *base = (void *)BASE;
    if (fstat(file, &found)) return 1;
    if (mmap(base, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != base) return 2;
    run(base);
    return 0;
}
"""
# With an emulated processor that has these instructions only; the last one has none for products of bytes.
PROCESSORS = {
    Features(wide_registers=False, dots=NEON, tables=NEON): "max",
    Features(wide_registers=False, dots=NEON, tables=NEON, signed=True): "cortex-a76",
    Features(wide_registers=False, dots=0, tables=NEON): "cortex-a57",
}
ADDRESSES = {
    *(Field.INPUTS, Field.INPUT_SUMS, Field.OUTPUTS, Field.OUTPUT_SUMS, Field.MATRIX, Field.SCALES, Field.BIAS),
    *(Field.WEIGHTS, Field.KEY_WEIGHTS, Field.CACHE),
}
NO_ADDRESSES = {Header.ROWS, Header.WANTED, Header.SCORES_SIZE}


def compile_for(features: Features, module: ir.Module) -> tuple[Any, Any]:
    """LLVM's AArch64 with the instructions that these features name, and a module optimised for it."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    few = [*ARM_FEATURES][: 0 if not features.dots else 1 if features.signed else 2]
    wanted = ",".join(f"+{name}" for name in few)
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine("generic", wanted, opt=3, reloc="static")
    return machine, optimise_module(module, machine)


class EmulatedSteps(CompiledSteps):
    """Steps that run on an emulated AArch64 with the features that `Features.detect` returns."""

    def __init__(self, shape: ModelShape, kinds: frozenset[ProductKind]) -> None:
        if shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None:
            pytest.skip(f"{COMPILER} and {EMULATOR} are not installed")
        self.numbers = {kind: StepKind.PRODUCTS + number for number, kind in enumerate(sorted(kinds, key=str))}
        features = Features.detect()
        self._processor, self._folder = PROCESSORS[features], TemporaryDirectory()
        program, code, kernels = (self._file(name) for name in ("program", "program.c", "kernels.o"))
        code.write_text(PROGRAM)
        machine, module = compile_for(features, self._build(shape, features, teams=False))
        kernels.write_bytes(machine.emit_object(module))
        subprocess.run([COMPILER, "-static", f"-DBASE={BASE}UL", "-o", program, code, kernels], check=True)

    def _file(self, name: str) -> Path:
        return Path(self._folder.name, name)

    def run(self, steps: Integers, header: "array[int]") -> None:
        table, head, counters = steps.copy(), np.array(header), np.zeros((len(steps), COUNTERS), np.int64)
        memory = _Memory()
        data = np.zeros(4, np.int64)
        memory.add(data.ctypes.data, data.nbytes)  # first, where the program expects it
        own = [memory.add(numbers.ctypes.data, numbers.nbytes) for numbers in (table, head, counters)]
        data[:] = (own[0], len(table), own[1], own[2])
        places: list[tuple[Integers, Any]] = [(table, (slice(None), field)) for field in ADDRESSES]
        places += [(head, field) for field in Header if field not in NO_ADDRESSES]
        for numbers, place in places:
            numbers[place] = np.vectorize(memory.find, otypes=[np.int64])(numbers[place])
        self._file("memory").write_bytes(memory.read())
        subprocess.run([EMULATOR, "-cpu", self._processor, self._file("program"), self._file("memory")], check=True)
        memory.write(self._file("memory").read_bytes())


class _Memory:
    """Parts of this process's memory, and where the emulated one has them."""

    def __init__(self) -> None:
        self._size = 0
        self._places: dict[int, tuple[int, int]] = {}  # by the address here: bytes, address there
        self._sizes = {}  # of all that tensors and arrays own
        for one in gc.get_objects():
            if type(one) in (torch.Tensor, torch.nn.Parameter) and one.is_cpu:
                self._sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            elif type(one) is array:
                address, count = one.buffer_info()
                self._sizes[address] = count * one.itemsize
        self._sizes.pop(0, None)
        self._starts = sorted(self._sizes)

    def add(self, address: int, size: int) -> int:
        """Return the address there of some bytes here."""
        if address not in self._places:
            self._places[address] = size, BASE + self._size
            self._size += -(-size // LINE) * LINE
        return self._places[address][1]

    def find(self, address: int) -> int:
        """Return the address there of one here, which is in what a tensor or an array owns."""
        if address == 0:
            return 0
        start = self._starts[bisect_right(self._starts, address) - 1]
        assert start <= address < start + self._sizes[start], "a step has an address that nothing owns"
        return self.add(start, self._sizes[start]) + address - start

    def read(self) -> bytes:
        parts = ((ctypes.string_at(start, size), size) for start, (size, _) in self._places.items())
        return b"".join(part.ljust(-(-size // LINE) * LINE, b"\0") for part, size in parts)

    def write(self, changed: bytes) -> None:
        for start, (size, place) in self._places.items():
            ctypes.memmove(start, changed[place - BASE :][:size], size)
