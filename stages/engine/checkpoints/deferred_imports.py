"""Imports a library without parts of others that it imports and hardly ever calls: they cost time and memory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What modelling code of `transformers` imports, besides the compiler. Measured with 5.24, together: 1.0 s of 2.0, and
# 130 MB.
OF_TRANSFORMERS = (
    "torch._dynamo._trace_wrapped_higher_order_op",
    "scipy.optimize",
    "accelerate",
    "accelerate.hooks",
    "accelerate.utils",
    "accelerate.utils.modeling",
)
# What is called of torch's compiler where nothing is compiled: it says of functions how to compile them.
_MARKS = ("disable", "allow_in_graph", "assume_constant_result", "graph_break")


class _StandIn(ModuleType):
    """In the place of a module while others are imported. Its functions, which they keep, import it when called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # by which others see that there is such a module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "extract_model_from_parallel":  # before a model is saved, which nothing here has wrapped
            return _leave_as_it_is

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return call


@contextmanager
def defer_imports(*names: str) -> Iterator[None]:
    """Let what is imported in a `with` block import these modules when it calls their functions for the first time. It
    may use them for nothing else. Modules that are loaded already stay.
    """
    stand_ins = {name: _StandIn(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name)


class _Compiler(_StandIn):
    """In the place of torch's compiler until more is wanted of it than marks."""

    def __getattr__(self, name: str) -> Any:
        waits = sys.modules.get(self.__name__) is self
        if waits and name in _MARKS:
            return _leave_as_it_is
        if waits and name != "__path__":  # which the import of a part of it reads
            super().__getattr__(name)
        if waits:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def _leave_as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else _leave_as_it_is


def defer_compiler() -> None:
    """Let torch import its compiler when something is compiled for the first time, and not when a module is made on the
    meta device or an optimiser makes a step. A compiler that is loaded already stays.
    """
    sys.modules.setdefault("torch._dynamo", _Compiler("torch._dynamo"))


class _Missing:
    """Finds no module of this name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._name:
            raise ModuleNotFoundError(name=name)


def keep_arrow_alone() -> None:
    """Let Arrow not import pandas to recognise its series, which it does with the first array: .3 s and 31 MB. A table
    can still be converted, but `pyarrow.array` reads a series as any sequence: for processes that have none.
    """
    missing = _Missing("pandas")
    sys.meta_path.insert(0, missing)
    try:
        import_module("pyarrow").array([0])
    finally:
        sys.meta_path.remove(missing)
