"""The one kind of child process: messages, calls with a time limit, restarts, and its end with its parent."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child_doubles as doubles
import pytest
from serving_tiny import HANG_SECONDS, has_ended, wait_until

from store.child import CallError, Child, ChildCalls, ChildError, KeptChild, RestartBudget
from store.errors import OmnidraftError


@pytest.fixture
def calls() -> Any:
    calls = ChildCalls(doubles.make_answer, "prefix-", name="calls")
    yield calls
    calls.close()


def end_of(run: Callable[..., None], *args: Any) -> ChildError:
    """Run a function in a child until it ends."""
    child = Child(run, *args, name="short")
    with pytest.raises(ChildError) as error:
        child.receive(HANG_SECONDS)
    child.close()
    assert has_ended(child.pid)
    return error.value


@pytest.mark.parametrize("size", [0, 1, 100_000, 50_000_000])
def test_messages_of_any_size_return(size: int):
    child = Child(doubles.echo, name="echo")
    child.send(message := ("a" * size, [None]))
    assert child.receive(HANG_SECONDS) == message
    child.send(None)
    with pytest.raises(ChildError, match="with exit status 0"):
        child.receive(HANG_SECONDS)
    child.close()


def test_the_end_is_named_by_the_last_error():
    assert str(end_of(doubles.exit_with, 3)) == "the process 'short' ended with exit status 3"
    raised = end_of(doubles.fail, OmnidraftError("a reason"))
    assert str(raised) == "the process 'short' failed: OmnidraftError('a reason')"
    assert repr(raised.error) == "OmnidraftError('a reason')"
    unread = end_of(doubles.fail_unpicklable)
    assert repr(unread.error) == """OmnidraftError("UnpicklableError('one')")"""


def test_a_function_that_cannot_be_found_is_named(monkeypatch: pytest.MonkeyPatch):
    def here(parent: Any) -> None: ...

    monkeypatch.setattr(doubles, "not_there", here, raising=False)
    here.__module__, here.__qualname__ = doubles.__name__, "not_there"
    assert "not_there" in str(end_of(here))


def test_a_killed_child_is_seen_by_the_thread_that_receives():
    child = Child(doubles.hang, name="hanging")
    assert child.receive(HANG_SECONDS) == "running"
    with pytest.raises(TimeoutError, match=r"must answer within 0\.01 s"):
        child.receive(0.01)
    timer = threading.Timer(0.05, child.kill)
    timer.start()
    with pytest.raises(ChildError, match=r"ended by signal 9 \(Killed\)"):
        child.receive(HANG_SECONDS)
    with pytest.raises(ChildError, match="'hanging' has ended"):
        child.send("x" * 1_000_000)
    child.close()


def test_signals_for_the_parent_do_not_end_it():
    child = Child(doubles.ignore_all, name="deaf")
    assert child.receive(HANG_SECONDS) == child.pid != os.getpgid(0), "it is in a process group of its own"
    child.close()


def test_variables_and_priority(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "key")
    monkeypatch.setenv("GIVEN", "1")
    child = Child(doubles.read_environment, name="environment", variables=("GIVEN",), niceness=3)
    names, niceness = child.receive(HANG_SECONDS)
    child.close()
    assert {"GIVEN", "PYTHONPATH"} <= set(names) <= {"GIVEN", "PYTHONPATH", "LC_CTYPE"}
    assert niceness == min(19, os.nice(0) + 3)


def test_records_and_warnings_arrive_once(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    caplog.set_level(logging.INFO, "omnidraft")
    child = Child(doubles.write_log, name="writer")
    assert child.receive(HANG_SECONDS) == "done"
    child.close()
    record, warning = caplog.records
    assert (record.getMessage(), record.levelname, record.name) == ("number 7", "WARNING", "omnidraft.test")
    assert (record.processName, vars(record)["unsent"], vars(record)["path"]) == ("writer", 3, "a")
    assert "UserWarning: careful" in warning.getMessage()
    assert capfd.readouterr() == ("", "")


def test_the_trace_of_an_unexpected_error_is_logged(caplog: pytest.LogCaptureFixture):
    end_of(doubles.fail, ValueError("unexpected"))
    (record,) = caplog.records
    assert "in fail" in record.getMessage()
    assert "ValueError: unexpected" in record.getMessage()
    end_of(doubles.fail, OmnidraftError("expected"))
    assert len(caplog.records) == 1


def test_a_child_that_is_not_trusted_sends_plain_values_only():
    child = Child(doubles.send_object, name="hostile", plain=True)
    with pytest.raises(ChildError, match=r"cannot be read.*must not name pathlib\."):
        child.receive(HANG_SECONDS)
    child.close()


def test_calls_are_answered_by_one_process(calls: ChildCalls):
    assert calls.pid is None, "the first call starts it"
    assert calls.call(("other", 7), HANG_SECONDS) == "prefix-7"
    first = calls.pid
    assert calls.call(("pid", None), HANG_SECONDS) == first
    assert calls.call(("echo", {"a": [b"b", 1.5]}), HANG_SECONDS) == {"a": [b"b", 1.5]}
    with pytest.raises(CallError, match=r"ValueError\('wrong'\)"):
        calls.call(("raise", "wrong"), HANG_SECONDS)
    assert calls.pid == first, "an error does not end it"


def test_a_child_is_started_before_its_first_call(calls: ChildCalls):
    calls.start()
    started = calls.pid
    assert started is not None
    calls.start()
    assert calls.call(("other", 7), HANG_SECONDS) == "prefix-7"
    assert calls.pid == started


def test_calls_of_many_threads_take_turns(calls: ChildCalls):
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda n=number: answers.append(calls.call(("echo", n), HANG_SECONDS)))
        for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(16))


def test_a_call_ends_at_its_limit_and_the_next_is_answered(calls: ChildCalls, tmp_path: Path):
    before = calls.call(("pid", None), HANG_SECONDS)
    with pytest.raises(TimeoutError):
        calls.call(("loop", str(tmp_path / "begun")), 0.2)
    assert has_ended(before)
    assert calls.call(("echo", 1), HANG_SECONDS) == 1


@pytest.mark.parametrize("request_", [("exit", 3), ("object", "a")], ids=["crash", "what must not be read"])
def test_a_call_that_ends_the_child_fails_and_the_next_is_answered(calls: ChildCalls, request_: tuple[str, Any]):
    with pytest.raises(ChildError):
        calls.call(request_, HANG_SECONDS)
    assert calls.call(("echo", 1), HANG_SECONDS) == 1


def test_a_child_that_is_killed_between_two_calls_is_started_again(calls: ChildCalls):
    before = calls.call(("pid", None), HANG_SECONDS)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not calls._child.alive)
    assert calls.call(("pid", None), HANG_SECONDS) != before


def test_a_child_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ChildError, match=r"UsageError.*no such model"):
        ChildCalls(doubles.fail_to_start, "no such model", name="failing").call("anything", HANG_SECONDS)
    monkeypatch.setattr("store.child.START_SECONDS", 0.0)
    with pytest.raises(ChildError, match="must start in 0 s"):
        ChildCalls(doubles.make_answer, "", name="slow").call("anything", HANG_SECONDS)


def test_closing_ends_the_call_that_runs(calls: ChildCalls, tmp_path: Path):
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            calls.call(("loop", str(tmp_path / "begun")), HANG_SECONDS)
        except ChildError as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    wait_until((tmp_path / "begun").exists)
    calls.close()
    thread.join(HANG_SECONDS)
    assert len(errors) == 1
    with pytest.raises(ChildError, match="was closed"):
        calls.call(("echo", 1), HANG_SECONDS)


def test_a_fork_has_a_child_of_its_own(calls: ChildCalls):
    before = calls.call(("pid", None), HANG_SECONDS)
    if not (fork := os.fork()):
        other = calls.call(("pid", None), HANG_SECONDS)
        calls.close()
        os._exit(0 if other != before and has_ended(other) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert calls.call(("pid", None), HANG_SECONDS) == before


def test_a_daemonic_process_may_start_one():
    """As a worker of vLLM is, which may have no child of `multiprocessing`."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    daemon = context.Process(target=lambda: answers.put(doubles.echo_once("hi")), daemon=True)
    daemon.start()
    assert answers.get(timeout=HANG_SECONDS) == "hi"
    daemon.join()


def test_children_end_with_a_parent_that_is_killed():
    """Both while they wait and while they work, and those of a child too."""
    outer = Child(doubles.start_another, name="outer")
    pids = outer.receive(HANG_SECONDS)
    assert not any(map(has_ended, pids))
    os.kill(outer.pid, signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, pids)))
    outer.close()


def test_a_child_ends_with_its_interpreter_and_with_its_last_reference():
    code = "import child_doubles, store.child\nprint(store.child.Child(child_doubles.hang, name='x').pid, flush=True)\n"
    kept = code.replace("print(", "child = ").replace(".pid, flush=True)", "\nprint(child.pid)")
    for program in (code, kept):
        done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
        assert done.stderr == ""
        assert has_ended(int(done.stdout))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Keeper:
    """Keeps a child and records what its functions are called with."""

    def __init__(self, run: Callable[..., None], *args: Any, delays: tuple[float | None, ...] = (None,)) -> None:
        self._run, self._args, self._delays = run, args, list(delays)
        self.started, self.messages, self.ends = 0, list[Any](), list[str]()
        self.child = KeptChild(self._start, self.messages.append, self._end)

    def _start(self) -> Child:
        self.started += 1
        return Child(self._run, *self._args, name="kept")

    def _end(self, error: BaseException) -> float | None:
        self.ends.append(str(error))
        return self._delays.pop(0)


def test_a_kept_child_is_started_again_as_often_as_it_may():
    keeper = Keeper(doubles.crash_after, 2, delays=(0.0, 0.0, None))
    wait_until(lambda: len(keeper.ends) == 3)
    assert keeper.messages == [0, 1] * 3
    assert keeper.ends == ["the process 'kept' ended with exit status 3"] * 3
    assert keeper.started == 3
    wait_until(lambda: keeper.child.pid is None)
    with pytest.raises(ChildError, match="no process runs"):
        keeper.child.send(1)
    keeper.child.close()


def test_a_kept_child_takes_a_last_message_and_ends():
    keeper = Keeper(doubles.echo)
    wait_until(lambda: keeper.child.pid is not None)
    keeper.child.send("message")
    keeper.child.send("other")
    wait_until(lambda: len(keeper.messages) == 2)
    pid = keeper.child.pid
    keeper.child.send(None)
    keeper.child.close()
    assert keeper.messages == ["message", "other"]
    assert keeper.ends == ["the process 'kept' ended with exit status 0"]
    assert has_ended(pid or 0)


def test_a_kept_child_that_does_not_end_is_killed():
    keeper = Keeper(doubles.hang)
    wait_until(lambda: keeper.messages == ["running"])
    keeper.child.close(0.01)
    assert keeper.ends == ["the process 'kept' ended by signal 9 (Killed)"]
    keeper.child.close(0.01)  # a second time as well


def test_closing_does_not_wait_for_the_next_start():
    keeper = Keeper(doubles.exit_with, 1, delays=(10_000.0,))
    wait_until(lambda: len(keeper.ends) == 1)
    keeper.child.close()
    assert keeper.started == 1


def test_an_error_of_a_listener_ends_the_child():
    def listen(message: Any) -> None:
        raise ValueError(message)

    ends: list[BaseException] = []
    child = KeptChild(lambda: Child(doubles.hang, name="kept"), listen, ends.append)
    wait_until(lambda: len(ends) == 1)
    assert repr(ends[0]) == "ValueError('running')"
    child.close()


def test_restarts_are_counted_within_a_window():
    now = [0.0]
    budget = RestartBudget(2, window=10.0, first_delay=1.0, now=lambda: now[0])
    assert (budget.next_delay(), budget.next_delay(), budget.next_delay()) == (1.0, 2.0, None)
    now[0] = 10.0
    assert budget.next_delay() == 1.0, "those before are forgotten"
    assert budget.restarts == 3


def test_restarts_before_a_child_that_worked_do_not_count():
    now = [0.0]
    budget = RestartBudget(2, window=100.0, first_delay=1.0, proven=5.0, now=lambda: now[0])
    for _ in range(9):
        budget.begin()
        now[0] += 5.0
        assert budget.next_delay() == 1.0
    budget.begin()
    now[0] += 4.9
    assert (budget.next_delay(), budget.next_delay()) == (2.0, None), "it had not worked for long enough"


def test_it_is_imported_quickly():
    """Every child imports it first: it needs the standard library alone."""
    code = (
        "import sys, store.child\n"
        "own = {n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(n for n in own if not n.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout == "['store', 'typing_extensions']\n", done.stderr
