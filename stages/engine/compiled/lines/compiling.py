"""Compiling with Numba, whose results are kept in the cache folder, and calls of compiled functions by address.

Numba's own cache knows a function by its file, and not by the files of what it calls. So its folder is named after all
files of the function's folder and of `stages/engine/compiled`: a change of any of them compiles again. What lies there
is code, as Python's own caches are.

Numba's own calls take 50 microseconds with many arrays when the processor has forgotten what they are. A call that
matters gets their addresses.
"""

import ctypes
import hashlib
import inspect
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, cfunc, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from stages.vocabulary.disk_cache import cache_folder

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_KINDS = {
    int: (types.int64, ctypes.c_int64),
    float: (types.float64, ctypes.c_double),
    Integers: (types.CPointer(types.int64), ctypes.c_void_p),
}

compiled = njit(error_model="numpy")  # a function that compiled functions call, and are compiled with


def compile_function(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls with arrays, for the types of its arguments."""
    return _compile(njit, function)


class CompiledCall:
    """A function of integers, floats and addresses, compiled or loaded at its first call or by `prepare`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @cached_property
    def _call(self) -> Callable[..., None]:
        own = [_KINDS[parameter.annotation] for parameter in inspect.signature(self._function).parameters.values()]
        signature = types.void(*(kind for kind, _ in own))
        # kept as long as its code is called
        self._compiled = _compile(lambda **options: cfunc(signature, **options), self._function)
        return ctypes.CFUNCTYPE(None, *(kind for _, kind in own))(self._compiled.address)

    def prepare(self) -> None:
        """Compile the function, or load it: seconds on the first start of a release."""
        _ = self._call

    def __call__(self, *numbers: float) -> None:
        self._call(*numbers)


def _compile(decorate: Callable[..., Any], function: Callable[..., Any]) -> Any:
    folder, before = cache_folder(), config.CACHE_DIR
    code = Path(function.__code__.co_filename).parent
    config.CACHE_DIR = "" if folder is None else str(folder / "numba" / _digest_code(code))
    try:
        return decorate(error_model="numpy", cache=folder is not None)(function)
    except RuntimeError:  # no folder can be written
        return decorate(error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before


@cache
def _digest_code(folder: Path) -> str:
    code = hashlib.sha256()
    for path in sorted({*folder.glob("*.py"), *Path(__file__).parents[1].rglob("*.py")}):
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


@intrinsic
def as_pointer(typing_context: Any, address: Any) -> Any:
    """Return an integer as a pointer."""
    signature = types.voidptr(address)
    return signature, lambda context, builder, signature, arguments: builder.inttoptr(arguments[0], cgutils.voidptr_t)


@compiled
def floats_at(address: int, count: int) -> Floats:
    """Return numbers of float32 at an address."""
    return carray(as_pointer(address), (count,), dtype=np.float32)


@compiled
def integers_at(address: int, count: int) -> Integers:
    """Return integers of 64 bits at an address."""
    return carray(as_pointer(address), (count,), dtype=np.int64)
