"""The exponential next to NumPy's in float64."""

import ctypes

import numpy as np
import pytest
from llvmlite import ir

from stages.engine.compiled.llvm.emitter import POINTER, VECTOR, VECTOR_SIZE, Emitter
from stages.engine.compiled.llvm.machine import compile_module
from stages.engine.compiled.llvm.vector_math import LOWEST, exponential


@pytest.fixture(scope="module")
def compiled():
    """The exponential of arrays whose length is a multiple of a vector's."""

    def build() -> ir.Module:
        module = ir.Module("exponential")
        emit = Emitter(module, "exponential", [POINTER, POINTER])
        emit.store(exponential(emit, emit.load(emit.arguments[0], VECTOR)), emit.arguments[1])
        emit.finish()
        return module

    kept = compile_module(("the exponential alone",), build)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(kept.get_function_address("exponential"))

    def compute(x):
        found = np.empty_like(x)
        for begin in range(0, len(x), VECTOR_SIZE):
            call(x[begin:].ctypes.data, found[begin:].ctypes.data)
        return found

    yield compute
    del kept


def test_it_is_right_within_one_unit_of_the_last_place(compiled):
    x = np.linspace(LOWEST, 88, 16_000, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    units = np.abs(compiled(x) - expected) / np.spacing(expected.astype(np.float32))
    assert units.max() < 1


def test_what_is_far_below_is_zero_and_what_is_no_number_stays_so(compiled):
    x = np.full(VECTOR_SIZE, -np.inf, dtype=np.float32)
    x[1], x[2], x[3] = np.nan, LOWEST - 1, 0
    found = compiled(x)
    assert found[0] == found[2] == 0
    assert np.isnan(found[1])
    assert found[3] == 1
