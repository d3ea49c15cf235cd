"""The processor of this machine: its instructions, and the functions that are compiled for it and run on its cores.

Threads are those of torch: its OpenMP library provides the team, so that no second team waits for the same cores.
"""

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir

from stages.engine.compiled.llvm.emitter import BYTE, INT, INTS, VECTOR_SIZE, Emitter, Value
from stages.vocabulary.disk_cache import digest_json, load_arrays, store_arrays

LIBRARY = re.compile(r"(/\S*(?:libgomp|libomp|libiomp5)\S*)$", re.MULTILINE)


@dataclass(frozen=True)
class Features:
    """Instructions of a processor that the kernels choose by."""

    wide_registers: bool  # 32 registers of 512 bits (AVX-512), which also look up 16 numbers at once
    # Widths in bits of its instructions for sums of four products of bytes, and of those that look bytes up in a table
    # of 16; 0 without any.
    dots: int
    tables: int = 0
    tiles: bool = False  # registers of 16 rows of 64 bytes, and products of bytes in them (AMX)

    @classmethod
    def detect(cls) -> "Features":
        features = llvm.get_host_cpu_features()
        wide = bool(features.get("avx512f") and features.get("avx512bw"))
        narrow = bool(features.get("avxvnni") or (features.get("avx512vnni") and features.get("avx512vl")))
        dots = 512 if wide and features.get("avx512vnni") else 256 if narrow else 0
        tiles = dots == 512 and bool(features.get("amx-int8")) and _may_use_tiles()
        return cls(wide, dots, 512 if wide else 256 if features.get("avx2") else 0, tiles)

    def add_dot(self, emit: Emitter, totals: Value, codes: Value, inputs: Value) -> Value:
        """Add, per number of 32 bits, the products of its bytes with those of an input. The codes are unsigned bytes,
        the inputs signed ones.
        """
        if self.dots == 512:
            return _dot(emit, totals, codes, inputs)
        if self.dots == 256:
            halves = zip(*(_halve(emit, one) for one in (totals, codes, inputs)), strict=True)
            return _join(emit, [_dot(emit, total, code, factor) for total, code, factor in halves])
        build = emit.builder
        for place in range(0, 32, 8):
            raised = [build.shl(one, emit.ints(24 - place)) for one in (codes, inputs)]
            product = build.mul(build.lshr(raised[0], emit.ints(24)), build.ashr(raised[1], emit.ints(24)))
            totals = build.add(totals, product)
        return totals

    def look_up(self, emit: Emitter, codes: Value, table: Sequence[int]) -> Value:
        """Return the byte of a table of 16 for every byte of a vector of words, which are below 16."""
        if self.tables == 512:
            return _shuffle(emit, "avx512.pshuf.b.512", codes, table)
        if self.tables == 256:
            return _join(emit, [_shuffle(emit, "avx2.pshuf.b", half, table) for half in _halve(emit, codes)])
        build, ones = emit.builder, emit.ints(0x01010101)
        values = [emit.ints(int.from_bytes([number] * 4, "little", signed=True)) for number in table]
        for place in range(4):  # of two numbers each bit of a code chooses one
            chosen = build.mul(build.and_(build.lshr(codes, emit.ints(place)), ones), emit.ints(255))
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [build.xor(low, build.and_(chosen, build.xor(low, high))) for low, high in pairs]
        return values[0]


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for the registers of tiles, which all threads of a process get on request."""
    if sys.platform != "linux":
        return False
    call, request, registers = 158, 0x1023, 18  # `arch_prctl`, ARCH_REQ_XCOMP_PERM, the data of tiles
    return bool(ctypes.CDLL(None).syscall(call, request, registers) == 0)


def _dot(emit: Emitter, totals: Value, codes: Value, inputs: Value) -> Value:
    width = 32 * totals.type.count
    numbers = ir.VectorType(BYTE, width // 8)
    parts = [emit.builder.bitcast(one, numbers) for one in (codes, inputs)]
    return emit.call(f"llvm.x86.avx512.vpdpbusd.{width}", totals.type, [totals, *parts])


def _shuffle(emit: Emitter, name: str, codes: Value, table: Sequence[int]) -> Value:
    bytes_of = ir.VectorType(BYTE, 4 * codes.type.count)
    numbers = ir.Constant(bytes_of, [*table] * (bytes_of.count // len(table)))
    found = emit.call(f"llvm.x86.{name}", bytes_of, [numbers, emit.builder.bitcast(codes, bytes_of)])
    return emit.builder.bitcast(found, codes.type)


def _halve(emit: Emitter, vector: Value) -> list[Value]:
    nothing, half = ir.Constant(INTS, ir.Undefined), VECTOR_SIZE // 2
    order = [list(range(half)), list(range(half, VECTOR_SIZE))]
    return [emit.builder.shuffle_vector(vector, nothing, ir.Constant(ir.VectorType(INT, half), part)) for part in order]


def _join(emit: Emitter, halves: list[Value]) -> Value:
    return emit.builder.shuffle_vector(*halves, ir.Constant(INTS, list(range(VECTOR_SIZE))))


def compile_module(made_from: Sequence[object], build: Callable[[], ir.Module]) -> Any:
    """Compile a module for this processor, or load what was compiled before on this machine. `made_from` is all that
    the module depends on besides the code of `stages/engine/compiled`. Returns LLVM's engine; keep it as long as its
    functions are called.
    """
    _prepare()
    processor = llvm.get_host_cpu_name()
    features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"
    machine = llvm.Target.from_default_triple().create_target_machine(processor, features, opt=3, jit=True)
    key = digest_json(
        processor, features, llvm.llvm_version_info, llvmlite.__version__, _digest_code(), repr(made_from)
    )
    stored = load_arrays("compiled", key, lambda arrays: arrays["code"].tobytes())
    if stored is None:
        parsed = llvm.parse_assembly(str(build()))
        parsed.verify()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
        stored = machine.emit_object(parsed)
        store_arrays("compiled", key, {"code": np.frombuffer(stored, np.uint8)})
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(stored))
    engine.finalize_object()
    return engine


@cache
def _digest_code() -> str:
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


@cache
def _prepare() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    others = {"sched_yield": _address(ctypes.CDLL(None), "sched_yield")} if YIELDS else {}
    for name, address in (find_team_functions() | others).items():
        llvm.add_symbol(name, address)


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


YIELDS = hasattr(os, "sched_yield")  # whether a thread that waits can let others run
TEAM_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num")


@cache
def find_team_functions() -> dict[str, int]:
    """Return the addresses of the functions of torch's OpenMP library; empty where it has none of these names."""
    torch.empty(1 << 16).add_(1)  # loads the library
    for path in (None, *_find_libraries()):  # first what was loaded in front of all, as vLLM does with OpenMP
        try:
            library = ctypes.CDLL(path)
            return {name: _address(library, name) for name in TEAM_FUNCTIONS}
        except (OSError, AttributeError, TypeError):  # Windows has no libraries without a name
            continue
    return {}


def _find_libraries() -> list[str]:
    """Return the OpenMP libraries that this process has loaded, torch's own first."""
    maps = Path("/proc/self/maps")
    loaded = LIBRARY.findall(maps.read_text(encoding="utf-8")) if maps.is_file() else []
    torch_folder = str(Path(torch.__file__).parent)
    return sorted(dict.fromkeys(loaded), key=lambda path: not path.startswith(torch_folder))


def make_team_call(address: int) -> Callable[[int, int], None]:
    """Return what runs a compiled function on a team of threads: `(address of its data, number of threads)`."""
    functions = find_team_functions()
    if not functions:
        alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        return lambda data, _: alone(data)
    start = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(
        functions["GOMP_parallel"]
    )
    return lambda data, threads: start(address, data, threads, 0)
