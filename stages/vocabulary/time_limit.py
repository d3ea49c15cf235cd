"""A time limit for code of others that runs in this thread, such as chat templates, which are programs."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OverTimeError(Exception):
    """Raised in the code that passes its time limit."""


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise `OverTimeError` in the code of this context when it takes longer.

    The error is raised between two steps of Python, so a single long computation in C ends first.

    >>> with limit_seconds(0.01):
    ...     while True:
    ...         pass
    Traceback (most recent call last):
    stages.vocabulary.time_limit.OverTimeError: it took more than 0.01 s
    """
    thread, lock, ended = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OverTimeError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                ended = True
            timer.cancel()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that was not raised yet
    except OverTimeError:
        raise OverTimeError(f"it took more than {seconds:g} s") from None
