"""The outbox loses no message, never blocks its callers, and keeps its state across processes."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from store.outbox import AT_ONCE, Body, Ledger, OutageError, Outbox, RetryPolicy, read_undelivered

QUICK = RetryPolicy(attempts=3, backoff=0.001, max_backoff=0.002, linger=0.001)


class Receiver:
    """Records delivered messages; `refuse(call)` returns whether the call of that number fails."""

    def __init__(self, refuse: Callable[[int], bool] = lambda call: False) -> None:
        self.received: list[tuple[str, list[int]]] = []
        self.calls = 0
        self._refuse = refuse

    def __call__(self, kind: str, bodies: list[Body]) -> Body:
        self.calls += 1
        if self._refuse(self.calls):
            raise ConnectionError(f"call {self.calls} refused")
        self.received.append((kind, [body["n"] for body in bodies]))
        return {"seen": bodies[-1]["n"], kind: bodies[-1]["n"]}


def post_all(outbox: Outbox, *kinds: str) -> None:
    for number, kind in enumerate(kinds):
        outbox.post(kind, {"n": number})


def new_outbox(path: Path, receiver: Receiver, **options) -> Outbox:
    return Outbox(path, receiver, retry_policy=options.pop("retry_policy", QUICK), **options)


def test_messages_arrive_in_order_and_nothing_is_left(tmp_path: Path):
    receiver = Receiver()
    outbox = new_outbox(tmp_path / "q.jsonl", receiver)
    post_all(outbox, "a", "b", "a", "c")
    assert outbox.close(5) == 0
    assert receiver.received == [("a", [0]), ("b", [1]), ("a", [2]), ("c", [3])]
    assert outbox.last_error is None


def test_adjacent_messages_of_a_merged_kind_are_sent_together_in_the_original_order(tmp_path: Path):
    receiver, gate = Receiver(), threading.Event()
    outbox = Outbox(
        tmp_path / "q.jsonl",
        lambda kind, bodies: gate.wait(5) and receiver(kind, bodies),
        merged=frozenset({"p"}),
        retry_policy=QUICK,
    )
    outbox.post("first", {"n": -1})
    post_all(outbox, "p", "p", "v", "p", "p", "p")
    gate.set()
    outbox.close(5)
    assert list(itertools.chain(*(numbers for _, numbers in receiver.received))) == [-1, 0, 1, 2, 3, 4, 5]
    assert [kind for kind, _ in itertools.groupby(receiver.received, lambda one: one[0])] == ["first", "p", "v", "p"]
    assert max(len(numbers) for kind, numbers in receiver.received if kind == "p") > 1


def test_a_failure_is_tried_again(tmp_path: Path):
    receiver = Receiver(refuse=lambda call: call in (1, 2))
    outbox = new_outbox(tmp_path / "q.jsonl", receiver)
    post_all(outbox, "a", "b")
    wait_until(lambda: len(receiver.received) == 2)
    assert (outbox.close(5), receiver.received, receiver.calls) == (0, [("a", [0]), ("b", [1])], 4)


def test_a_message_that_always_fails_does_not_block_the_others_and_is_counted(tmp_path: Path):
    def deliver(kind: str, bodies: list[Body]) -> Body:
        return {} if kind != "bad" else 1 / 0

    outbox = Outbox(tmp_path / "q.jsonl", deliver, retry_policy=QUICK)
    post_all(outbox, "a", "bad", "b")
    assert outbox.close(5) == 1
    assert [message.kind for message in read_undelivered(tmp_path / "q.jsonl")] == ["bad"]
    failures = [line for line in spool_lines(tmp_path / "q.jsonl") if line.get("outcome") == "failed"]
    assert failures[0]["ids"] == [1]
    assert "division by zero" in failures[0]["error"]


def test_a_gate_is_tried_beyond_the_number_of_attempts(tmp_path: Path):
    receiver = Receiver(refuse=lambda call: call <= 20)
    outbox = new_outbox(tmp_path / "q.jsonl", receiver, gates=frozenset({"start"}))
    post_all(outbox, "start", "a")
    wait_until(lambda: len(receiver.received) == 2)
    assert (outbox.close(5), receiver.received) == (0, [("start", [0]), ("a", [1])])


def test_a_failed_message_is_tried_once_more_on_close(tmp_path: Path):
    receiver = Receiver(refuse=lambda call: call <= QUICK.attempts)
    outbox = new_outbox(tmp_path / "q.jsonl", receiver)
    outbox.post("a", {"n": 0})
    wait_until(lambda: receiver.calls >= QUICK.attempts)
    assert (outbox.close(5), receiver.received) == (0, [("a", [0])])


def test_a_receiver_that_hangs_blocks_neither_post_nor_close(tmp_path: Path):
    release = threading.Event()
    outbox = Outbox(tmp_path / "q.jsonl", lambda kind, bodies: {"x": release.wait(30)}, retry_policy=QUICK)
    started = time.monotonic()
    for number in range(2000):
        outbox.post("a", {"n": number})
    assert outbox.close(0.2) == 2000
    assert time.monotonic() - started < 5
    release.set()


def test_a_later_process_sends_undelivered_messages_and_none_twice(tmp_path: Path):
    first = new_outbox(tmp_path / "q.jsonl", Receiver(refuse=lambda call: call > 2))
    post_all(first, "a", "b", "c", "d")
    assert first.close(5) == 2
    receiver = Receiver()
    second = new_outbox(tmp_path / "q.jsonl", receiver)
    second.post("e", {"n": 4})
    assert second.close(5) == 0
    assert receiver.received == [("c", [2]), ("d", [3]), ("e", [4])]


def test_a_later_process_has_the_results_of_earlier_deliveries(tmp_path: Path):
    outbox = new_outbox(tmp_path / "q.jsonl", Receiver())
    post_all(outbox, "a", "b")
    outbox.close(5)
    assert Ledger.read(tmp_path / "q.jsonl").known == {"seen": 1, "a": 0, "b": 1}


def test_a_line_torn_by_a_crash_loses_that_line_only(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"id":0,"kind":"a","body":{"n":0}}\n{"id":1,"kind":"a","bo')
    receiver = Receiver()
    outbox = new_outbox(path, receiver)
    outbox.post("a", {"n": 7})
    assert outbox.close(5) == 0
    assert receiver.received == [("a", [0]), ("a", [7])]


def test_posting_after_close_is_an_error(tmp_path: Path):
    outbox = new_outbox(tmp_path / "q.jsonl", Receiver())
    assert outbox.close(5) == outbox.close(5) == 0
    with pytest.raises(ValueError, match="before close"):
        outbox.post("a", {"n": 0})


def test_a_message_waits_until_it_is_released(tmp_path: Path):
    receiver = Receiver()
    outbox = new_outbox(tmp_path / "q.jsonl", receiver, keep=0)
    post_all(outbox, "a", "b")
    mark = outbox.mark()
    post_all(outbox, "c", "d")
    threading.Thread(target=outbox.release, args=(mark,)).start()
    wait_until(lambda: len(receiver.received) == 2)
    assert (outbox.close(5), receiver.received) == (2, [("a", [0]), ("b", [1])])


def test_messages_after_the_last_commit_are_discarded_and_may_be_posted_again(tmp_path: Path):
    first = new_outbox(tmp_path / "q.jsonl", Receiver(), keep=0)
    post_all(first, "a", "b")
    mark = first.mark()
    post_all(first, "lost", "lost")
    first.close(5)  # equivalent to a kill: nothing was released
    receiver = Receiver()
    second = new_outbox(tmp_path / "q.jsonl", receiver, keep=mark)
    assert second.mark() == mark == 2
    second.post("again", {"n": 7})
    second.release(second.mark())
    assert second.close(5) == 0
    assert receiver.received == [("a", [0]), ("b", [1]), ("again", [7])]
    assert [line["id"] for line in spool_lines(tmp_path / "q.jsonl") if "id" in line] == [0, 1, 2]


def test_resuming_from_an_earlier_commit_keeps_the_results_of_deliveries(tmp_path: Path):
    first = new_outbox(tmp_path / "q.jsonl", Receiver(), keep=0)
    post_all(first, "a", "b", "c")
    first.release(first.mark())
    assert first.close(5) == 0
    receiver = Receiver()
    second = new_outbox(tmp_path / "q.jsonl", receiver, keep=1)
    assert Ledger.read(tmp_path / "q.jsonl").known["c"] == 2
    second.post("d", {"n": 9})
    second.release(second.mark())
    assert (second.close(5), receiver.received) == (0, [("d", [9])])


def test_marks_never_decrease_even_if_the_file_was_lost(tmp_path: Path):
    outbox = new_outbox(tmp_path / "q.jsonl", Receiver(), keep=5)
    outbox.post("a", {"n": 0})
    assert (outbox.mark(), outbox.close(5)) == (6, 1)


def test_an_outbox_without_commits_delivers_at_once_and_refuses_marks(tmp_path: Path):
    receiver = Receiver()
    outbox = new_outbox(tmp_path / "q.jsonl", receiver)
    outbox.post("a", {"n": 0})
    with pytest.raises(ValueError, match="keep="):
        outbox.release(1)
    assert (outbox.close(5), receiver.received) == (0, [("a", [0])])


def test_the_delay_between_attempts_doubles_up_to_a_bound(tmp_path: Path):
    outbox = new_outbox(tmp_path / "q.jsonl", Receiver(), retry_policy=RetryPolicy())
    waits = list(itertools.islice(outbox._backoffs(), 2000))
    assert waits[:7] == [1, 2, 4, 8, 16, 30, 30]
    assert set(waits[7:]) == {30}
    outbox.close(5)


def test_messages_wait_in_order_during_an_outage_of_any_length(tmp_path: Path):
    receiver, calls = Receiver(), itertools.count(1)

    def deliver(kind: str, bodies: list[Body]) -> Body:
        if next(calls) <= 10 * QUICK.attempts:
            raise OutageError("unreachable")
        return receiver(kind, bodies)

    outbox = Outbox(tmp_path / "q.jsonl", deliver, retry_policy=QUICK)
    post_all(outbox, "a", "b", "c")
    wait_until(lambda: len(receiver.received) == 3)
    assert (outbox.close(5), receiver.received) == (0, [("a", [0]), ("b", [1]), ("c", [2])])
    assert all(line["outcome"] == "delivered" for line in spool_lines(tmp_path / "q.jsonl") if "ids" in line)


def test_close_retries_an_outage_a_few_times_only(tmp_path: Path):
    calls = itertools.count(1)

    def deliver(kind: str, bodies: list[Body]) -> Body:
        next(calls)
        raise OutageError("unreachable")

    outbox = Outbox(tmp_path / "q.jsonl", deliver, retry_policy=QUICK)
    post_all(outbox, *["a"] * 100)
    assert outbox.close(30) == 100
    assert next(calls) < 1000, "the receiver was called for every message"
    assert outbox.last_error == "a: unreachable"


def test_one_bad_message_does_not_fail_the_others_of_its_batch(tmp_path: Path):
    receiver = Receiver()

    def deliver(kind: str, bodies: list[Body]) -> Body:
        if any(body["n"] == 3 for body in bodies):
            raise ValueError("refused")
        return receiver(kind, bodies)

    outbox = new_outbox(tmp_path / "q.jsonl", deliver, merged=frozenset({"p"}), keep=0)
    post_all(outbox, *["p"] * 6)
    outbox.release(outbox.mark())
    assert outbox.close(5) == 1
    assert list(itertools.chain(*(numbers for _, numbers in receiver.received))) == [0, 1, 2, 4, 5]


def test_memory_holds_a_bounded_number_of_messages(tmp_path: Path):
    largest = 0

    def deliver(kind: str, bodies: list[Body]) -> Body:
        nonlocal largest
        largest = max(largest, len(bodies))
        return {}

    outbox = new_outbox(tmp_path / "q.jsonl", deliver, merged=frozenset({"p"}), keep=0)
    post_all(outbox, *["p"] * (3 * AT_ONCE))
    outbox.release(outbox.mark())
    assert outbox.close(20) == 0
    assert largest == AT_ONCE


def test_a_partly_written_line_loses_that_line_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    receiver = Receiver()
    outbox = new_outbox(tmp_path / "q.jsonl", receiver, keep=0)
    outbox.post("a", {"n": 0})
    whole = outbox._append
    monkeypatch.setattr(outbox, "_append", FullDisk(whole))
    with pytest.raises(OSError, match="No space"):
        outbox.post("a", {"n": 1})
    monkeypatch.setattr(outbox, "_append", whole)
    outbox.post("a", {"n": 2})
    outbox.release(outbox.mark())
    assert (outbox.close(5), receiver.received) == (0, [("a", [0]), ("a", [2])])


def test_a_line_without_its_line_end_does_not_affect_other_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    receiver = Receiver()
    outbox = new_outbox(tmp_path / "q.jsonl", receiver, keep=0)
    whole = outbox._append
    monkeypatch.setattr(outbox, "_append", FullDisk(whole, len('{"id":0,"kind":"a","body":{"n":1}}')))
    with pytest.raises(OSError, match="No space"):
        outbox.post("a", {"n": 1})
    monkeypatch.setattr(outbox, "_append", whole)
    post_all(outbox, "b", "c")
    outbox.post("never released", {"n": 3})
    outbox.release(3)
    assert (outbox.close(5), receiver.received) == (1, [("a", [1]), ("b", [0]), ("c", [1])])


FOREIGN = [
    {"id": 0, "kind": "a", "body": [1]},
    {"id": "0", "kind": "a", "body": {"n": 1}},
    {"id": 0},
    {"ids": [[]], "result": {}},
    {"ids": [0], "outcome": "delivered"},
    {"ids": 0, "outcome": "delivered", "result": {}},
]


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_line_of_another_form_is_skipped(tmp_path: Path, foreign: Body):
    path, receiver = tmp_path / "q.jsonl", Receiver()
    known = {"id": 0, "kind": "a", "body": {"n": 5}, "more": 1}
    path.write_text("".join(json.dumps(line) + "\n" for line in (foreign, known)))
    outbox = new_outbox(path, receiver)
    outbox.post("b", {"n": 6})
    assert (outbox.close(5), receiver.received) == (0, [("a", [5]), ("b", [6])])


def test_an_unreadable_spool_is_reported_and_does_not_stop_posting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unreadable(self: Outbox) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "_read_released", unreadable)
        outbox = new_outbox(tmp_path / "q.jsonl", Receiver())
        wait_until(lambda: outbox.last_error is not None)
    post_all(outbox, "a", "b")
    assert "q.jsonl: [Errno 5] Input/output error" in str(outbox.last_error)
    assert (outbox.mark(), outbox.close(5)) == (2, 2)
    assert new_outbox(tmp_path / "q.jsonl", Receiver()).close(5) == 0


class FullDisk:
    """A file that accepts some bytes and then fails."""

    def __init__(self, file, free: int = 10) -> None:
        self._file, self._free = file, free

    def write(self, line: bytes) -> int:
        if not self._free:
            raise OSError(28, "No space left on device")
        taken, self._free = self._file.write(line[: self._free]), 0
        return taken


def spool_lines(path: Path) -> list[Body]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()
