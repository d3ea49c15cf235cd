"""Compiling with Numba, whose results are kept in the cache folder, and calls of compiled functions by address.

Numba's own cache knows a function by its file, and not by the files of what it calls. So its folder is named after all
files of the function's folder and of `stages/engine/compiled`: a change of any of them compiles again. What lies there
is code, as Python's own caches are.

Numba's own calls take 50 microseconds with many arrays when the processor has forgotten what they are. A call that
matters gets one argument, the address of a table with the addresses of the arrays.
"""

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache
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
CALL = types.void(types.CPointer(types.int64))

compiled = njit(error_model="numpy")  # a function that compiled functions call, and are compiled with


def compile_function(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls with arrays, for the types of its arguments."""
    return _compile(njit, function)


def compile_call(function: Callable[..., None]) -> Callable[[int], None]:
    """Compile a function of a table of integers, and return what calls it with the table's address."""
    made = _compile(lambda **options: cfunc(CALL, **options), function)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address)
    return lambda address, _made=made: call(address)  # type: ignore[misc]  # kept as long as its code is called


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
def doubles_at(address: int, count: int) -> npt.NDArray[np.float64]:
    """Return numbers of float64 at an address."""
    return carray(as_pointer(address), (count,), dtype=np.float64)


@compiled
def integers_at(address: int, count: int) -> Integers:
    """Return integers of 64 bits at an address."""
    return carray(as_pointer(address), (count,), dtype=np.int64)
