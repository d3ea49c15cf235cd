"""Workers that compute updates: their torch threads, and that no thread remains."""

import threading

import pytest
import torch

from stages.learn.training.scheduler import ThreadWorker


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def count_threads_elsewhere() -> int:
    """The number of threads that torch reports to a new thread."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("two_threads")
def test_the_own_thread_computes_with_one_core_and_leaves_all_others_as_they_were():
    worker = ThreadWorker()
    assert worker.submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == 2
    assert count_threads_elsewhere() == 2
    assert worker.submit(torch.get_num_threads).result() == 1


def test_work_on_the_own_thread_does_not_keep_the_caller():
    worker, proceed = ThreadWorker(), threading.Event()
    work = worker.submit(lambda: proceed.wait(60))
    assert not work.done()
    proceed.set()
    assert work.result()
