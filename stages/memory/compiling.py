"""Compiling with Numba, whose results are kept in the cache folder.

Numba's own cache knows a function by its file, and not by the files of what it calls. So the folder is named after all
files of this package: a change of any of them compiles again. What lies there is code, as Python's own caches are.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import cfunc, config, njit

from stages.vocabulary.disk_cache import cache_folder

compiled = njit(error_model="numpy")  # a function that compiled functions call, and are compiled with


def compile_function(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls with arrays, for the types of its arguments."""
    return _compile(njit, function)


def compile_call(signature: Any, function: Callable[..., None]) -> Any:
    """Compile a function of pointers, which has an `address`."""
    return _compile(lambda **options: cfunc(signature, **options), function)


def _compile(decorate: Callable[..., Any], function: Callable[..., Any]) -> Any:
    folder, before = cache_folder(), config.CACHE_DIR
    config.CACHE_DIR = "" if folder is None else str(folder / "numba" / _digest_package())
    try:
        return decorate(error_model="numpy", cache=folder is not None)(function)
    except RuntimeError:  # no folder can be written
        return decorate(error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before


@cache
def _digest_package() -> str:
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()[:16]
