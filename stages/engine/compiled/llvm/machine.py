"""The processor of this machine: its instructions, and the functions that are compiled for it and run on its cores.

Threads are those of torch: its OpenMP library provides the team, so that no second team waits for the same cores.
"""

import ctypes
import hashlib
import os
import platform
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

IS_ARM, NEON = platform.machine() in ("aarch64", "arm64"), 128  # bits of its registers
# LLVM's names of AArch64's products of bytes, signed ones first: Linux's vector and bit of them, Apple's name.
ARM_FEATURES = {"dotprod": (16, 20, "FEAT_DotProd"), "i8mm": (26, 13, "FEAT_I8MM")}
LIBRARY = re.compile(r"(/\S*(?:libgomp|libomp|libiomp5)\S*)$", re.MULTILINE)


@dataclass(frozen=True)
class Features:
    """Instructions of a processor that the kernels choose by."""

    wide_registers: bool  # 32 registers of 512 bits (AVX-512), which also look up 16 numbers at once
    # Widths in bits of its instructions for sums of four products of bytes, and of those that look bytes up in a table
    # of 16; 0 without any. Those of 128 bits are of AArch64.
    dots: int
    tables: int = 0
    tiles: bool = False  # registers of 16 rows of 64 bytes, and products of bytes in them (AMX)
    signed: bool = False  # whether the codes are signed bytes in products, as inputs are, or unsigned ones

    @classmethod
    def detect(cls) -> "Features":
        if IS_ARM:
            found = _find_arm_features()
            return cls(False, NEON if found else 0, NEON, signed=found == ["dotprod"])
        features = llvm.get_host_cpu_features()
        wide = bool(features.get("avx512f") and features.get("avx512bw"))
        narrow = bool(features.get("avxvnni") or (features.get("avx512vnni") and features.get("avx512vl")))
        dots = 512 if wide and features.get("avx512vnni") else 256 if narrow else 0
        tiles = dots == 512 and bool(features.get("amx-int8")) and _may_use_tiles()
        return cls(wide, dots, 512 if wide else 256 if features.get("avx2") else 0, tiles)

    def add_dot(self, emit: Emitter, totals: Value, codes: Value, inputs: Value) -> Value:
        """Add, per number of 32 bits, the products of its bytes with those of an input. The codes are bytes as `signed`
        states, the inputs signed ones.
        """
        if self.dots:
            name = f"x86.avx512.vpdpbusd.{self.dots}"
            if self.dots == NEON:
                name = f"aarch64.neon.{'sdot' if self.signed else 'usdot'}.v4i32.v16i8"
            parts = zip(*(_split(emit, one, self.dots) for one in (totals, codes, inputs)), strict=True)
            return _join(emit, [_dot(emit, name, *part) for part in parts])
        build = emit.builder
        for place in range(0, 32, 8):
            raised = [build.shl(one, emit.ints(24 - place)) for one in (codes, inputs)]
            product = build.mul(build.lshr(raised[0], emit.ints(24)), build.ashr(raised[1], emit.ints(24)))
            totals = build.add(totals, product)
        return totals

    def look_up(self, emit: Emitter, codes: Value, table: Sequence[int]) -> Value:
        """Return the byte of a table of 16 for every byte of a vector of words, which are below 16."""
        if self.tables:
            return _join(emit, [_look_up(emit, part, table) for part in _split(emit, codes, self.tables)])
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


@cache
def _find_arm_features() -> list[str]:
    """Ask the operating system for instructions that LLVM names but does not look for."""
    if sys.platform not in ("linux", "darwin"):
        return []
    library = ctypes.CDLL(None)
    if sys.platform == "linux":
        return [name for name, (vector, bit, _) in ARM_FEATURES.items() if library.getauxval(vector) >> bit & 1]
    found = []
    for name, (*_, own) in ARM_FEATURES.items():
        value, size = ctypes.c_int(0), ctypes.c_size_t(4)
        library.sysctlbyname(f"hw.optional.arm.{own}".encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
        found += [name] * value.value
    return found


def _dot(emit: Emitter, name: str, totals: Value, codes: Value, inputs: Value) -> Value:
    numbers = ir.VectorType(BYTE, 4 * totals.type.count)
    parts = [emit.builder.bitcast(one, numbers) for one in (codes, inputs)]
    return emit.call(f"llvm.{name}", totals.type, [totals, *parts])


def _look_up(emit: Emitter, codes: Value, table: Sequence[int]) -> Value:
    names = {16: "x86.avx512.pshuf.b.512", 8: "x86.avx2.pshuf.b", 4: "aarch64.neon.tbl1.v16i8"}
    bytes_of = ir.VectorType(BYTE, 4 * codes.type.count)
    numbers = ir.Constant(bytes_of, [*table] * (bytes_of.count // len(table)))
    found = emit.call(f"llvm.{names[codes.type.count]}", bytes_of, [numbers, emit.builder.bitcast(codes, bytes_of)])
    return emit.builder.bitcast(found, codes.type)


def _split(emit: Emitter, vector: Value, width: int) -> list[Value]:
    """Return the parts of a vector that have so many bits."""
    nothing, count = ir.Constant(INTS, ir.Undefined), width // 32
    orders = [range(first, first + count) for first in range(0, VECTOR_SIZE, count)]
    parts = (ir.Constant(ir.VectorType(INT, count), list(order)) for order in orders)
    return [emit.builder.shuffle_vector(vector, nothing, part) for part in parts]


def _join(emit: Emitter, parts: list[Value]) -> Value:
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(INT, count), list(range(count)))
        parts = [emit.builder.shuffle_vector(*pair, order) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def compile_module(made_from: Sequence[object], build: Callable[[], ir.Module]) -> Any:
    """Compile a module for this processor, or load what was compiled before on this machine. `made_from` is all that
    the module depends on besides the code of `stages/engine/compiled`. Returns LLVM's engine; keep it as long as its
    functions are called.
    """
    _prepare()
    processor = llvm.get_host_cpu_name()
    others = [f"+{name}" for name in _find_arm_features()] if IS_ARM else ["-prefer-256-bit"]
    features = ",".join(filter(None, [llvm.get_host_cpu_features().flatten(), *others]))
    machine = llvm.Target.from_default_triple().create_target_machine(processor, features, opt=3, jit=True)
    key = digest_json(
        processor, features, llvm.llvm_version_info, llvmlite.__version__, _digest_code(), repr(made_from)
    )
    stored = load_arrays("compiled", key, lambda arrays: arrays["code"].tobytes())
    if stored is None:
        stored = machine.emit_object(optimise_module(build(), machine))
        store_arrays("compiled", key, {"code": np.frombuffer(stored, np.uint8)})
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(stored))
    engine.finalize_object()
    return engine


def optimise_module(module: ir.Module, machine: Any) -> Any:
    """Return a module as LLVM compiles it for a machine."""
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return parsed


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
    maps, torch_folder = Path("/proc/self/maps"), Path(torch.__file__).parent
    if not maps.is_file():  # macOS, where torch brings LLVM's library
        return [str(path) for path in torch_folder.glob("lib/libomp*.dylib")]
    loaded = LIBRARY.findall(maps.read_text(encoding="utf-8"))
    return sorted(dict.fromkeys(loaded), key=lambda path: not path.startswith(str(torch_folder)))


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
