"""Where an update is computed: on a thread of its own beside decoding, or in its place on the calling thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Worker(Protocol):
    """Does one piece of work after the other."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Take a piece of work. Its result, or what it raised, comes with the future's `result()`."""
        ...


class CallingThread:
    """Does the work before `submit` returns."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do it. What it raises is raised here already."""
        done: Future[T] = Future()
        done.set_result(work())
        return done


class OwnThread:
    """One thread that computes with one core.

    The interpreter's end waits for a piece of work that is under way; the thread ends with this object.
    """

    def __init__(self) -> None:
        # How many threads torch uses is kept per thread, and once more for threads that ask for the first time. The
        # latter is put back behind the worker's first question: it alone is to compute with one.
        others = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, "distill", _be_modest)
        self._pool.submit(int).result()
        torch.set_num_threads(others)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue it."""
        return self._pool.submit(work)


def _be_modest() -> None:
    # Not at a lower priority: the loop waits for an update at a fixed place, and on a busy machine it would wait for
    # a thread that is never let run.
    torch.set_num_threads(1)
    torch.get_num_threads()  # the first question in a thread: from here on the number is its own
