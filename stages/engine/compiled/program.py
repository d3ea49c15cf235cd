"""Compiles the steps of a model and runs them, all in one call.

A program in Python is a table of integers (`steps.py`); the compiled function reads it step by step.
"""

from array import array
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir

from stages.engine.compiled.attention import emit_attend
from stages.engine.compiled.llvm.emitter import INT, LONG, POINTER, Emitter, Value
from stages.engine.compiled.llvm.machine import YIELDS, Features, compile_module, find_team_functions, make_team_call
from stages.engine.compiled.products import ProductKind, emit_product
from stages.engine.compiled.rows import emit_add, emit_gate, emit_normalise, emit_rotate, emit_round
from stages.engine.compiled.shape import ModelShape
from stages.engine.compiled.steps import COUNTERS, FIELDS, Field, Header, StepKind

STEPS = {
    StepKind.NORMALISE: emit_normalise,
    StepKind.ROUND: emit_round,
    StepKind.ROTATE: emit_rotate,
    StepKind.ATTEND: emit_attend,
    StepKind.GATE: emit_gate,
    StepKind.ADD: emit_add,
}
Integers = npt.NDArray[np.int64]
SPINS = 1 << 12  # looks at a counter before others are let run


class CompiledSteps:
    """The compiled functions for a model's shape and the kinds of its products."""

    def __init__(self, shape: ModelShape, kinds: frozenset[ProductKind]) -> None:
        self.numbers = {kind: StepKind.PRODUCTS + number for number, kind in enumerate(sorted(kinds, key=str))}
        features, teams = Features.detect(), bool(find_team_functions())
        made_from = (shape, sorted(map(str, kinds)), features, teams)
        self._engine = compile_module(made_from, lambda: self._build(shape, features, teams=teams))
        self._call = make_team_call(self._engine.get_function_address("run"))

    def _build(self, shape: ModelShape, features: Features, *, teams: bool) -> ir.Module:
        module = ir.Module("steps")
        for emit_step in STEPS.values():
            emit_step(module, shape)
        for kind in self.numbers:
            emit_product(module, kind, features)
        names = {int(kind): kind.name.lower() for kind in STEPS}
        _emit_run(module, names | {number: kind.name for kind, number in self.numbers.items()}, teams=teams)
        return module

    def run(self, steps: Integers, header: "array[int]") -> None:
        counters = np.zeros((len(steps), COUNTERS), np.int64)
        data = array("q", (steps.ctypes.data, len(steps), header.buffer_info()[0], counters.ctypes.data))
        self._call(data.buffer_info()[0], torch.get_num_threads())


compile_steps = cache(CompiledSteps)  # once per process


def _emit_run(module: ir.Module, names: dict[int, str], *, teams: bool) -> None:
    """Define the function of a thread: it takes items of every step while there are any, and waits for their end."""
    emit = Emitter(module, "run", [POINTER])
    data = emit.arguments[0]
    steps, count, header, counters = (
        emit.pointer(data, 0),
        emit.field(data, 1),
        emit.pointer(data, 2),
        emit.pointer(data, 3),
    )
    thread = emit.builder.zext(emit.call("omp_get_thread_num", INT, []), LONG) if teams else emit.long(0)
    with emit.loop(0, count) as number:
        step = emit.offset(steps, emit.multiply(number, FIELDS), 8)
        taken = emit.offset(counters, emit.multiply(number, COUNTERS), 8)
        _emit_step(emit, names, step, header, (taken, emit.offset(taken, 1, 8)), thread)
    emit.finish()


def _emit_step(
    emit: Emitter, names: dict[int, str], step: Value, header: Value, counters: tuple[Value, Value], thread: Value
) -> None:
    """Emit the work of a thread on one step. The counters are the addresses of the numbers of items that are taken, and
    that are done.
    """
    build, (taken, done) = emit.builder, counters
    wanted = build.icmp_signed("!=", emit.field(step, Field.WANTED_ONLY), emit.long(0))
    rows = build.select(wanted, emit.field(header, Header.WANTED), emit.field(header, Header.ROWS))
    items = emit.add(emit.multiply(rows, emit.field(step, Field.PER_ROW)), emit.field(step, Field.FIXED))
    chunk = emit.field(step, Field.CHUNK)
    with emit.repeat() as stop:
        begin = build.atomic_rmw("add", taken, chunk, "monotonic")
        stop(build.icmp_signed(">=", begin, items))
        end = emit.add(begin, chunk)
        end = build.select(build.icmp_signed("<", end, items), end, items)
        arguments = [step, header, begin, end, thread]
        emit.switch(
            emit.field(step, Field.KIND),
            {kind: partial(build.call, emit.module.globals[name], arguments) for kind, name in names.items()},
        )
        build.atomic_rmw("add", done, emit.subtract(end, begin), "release")
    tries = emit.variable(LONG, emit.long(0))
    emit.set(tries, emit.long(0))
    with emit.repeat() as stop:
        stop(build.icmp_signed(">=", build.load_atomic(done, "acquire", 8, typ=LONG), items))
        emit.set(tries, emit.add(emit.get(tries, LONG), 1))
        if YIELDS:
            with build.if_then(build.icmp_signed(">", emit.get(tries, LONG), emit.long(SPINS))):
                emit.call("sched_yield", INT, [])
