"""The outbox loses nothing, waits for nobody, and remembers across processes."""

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from store.outbox import Body, Ledger, Outbox, Patience

QUICK = Patience(attempts=3, backoff=0.001, longest=0.002, linger=0.001)


class Receiver:
    """Keeps what it was given; `refuse(call)` says whether the call of that number fails."""

    def __init__(self, refuse: Callable[[int], bool] = lambda call: False):
        self.got: list[tuple[str, list[int]]] = []
        self.calls = 0
        self._refuse = refuse

    def __call__(self, kind: str, bodies: list[Body]) -> Body:
        self.calls += 1
        if self._refuse(self.calls):
            raise ConnectionError(f"call {self.calls} refused")
        self.got.append((kind, [body["n"] for body in bodies]))
        return {"seen": bodies[-1]["n"]}


def post_all(outbox: Outbox, *kinds: str) -> None:
    for number, kind in enumerate(kinds):
        outbox.post(kind, {"n": number})


def outbox_over(path: Path, receiver: Receiver, **options) -> Outbox:
    return Outbox(path, receiver, patience=options.pop("patience", QUICK), **options)


def test_messages_arrive_in_order_and_nothing_is_left(tmp_path: Path):
    receiver = Receiver()
    outbox = outbox_over(tmp_path / "q.jsonl", receiver)
    post_all(outbox, "a", "b", "a", "c")
    assert outbox.close(5) == 0
    assert receiver.got == [("a", [0]), ("b", [1]), ("a", [2]), ("c", [3])]
    assert outbox.trouble is None


def test_neighbours_of_a_merged_kind_travel_together_but_never_past_another_kind(tmp_path: Path):
    receiver, gate = Receiver(), threading.Event()
    outbox = Outbox(
        tmp_path / "q.jsonl",
        lambda kind, bodies: gate.wait(5) and receiver(kind, bodies),
        merged=frozenset({"p"}),
        patience=QUICK,
    )
    outbox.post("first", {"n": -1})
    post_all(outbox, "p", "p", "v", "p", "p", "p")
    gate.set()
    outbox.close(5)
    assert list(itertools.chain(*(numbers for _, numbers in receiver.got))) == [-1, 0, 1, 2, 3, 4, 5]
    assert [kind for kind, _ in itertools.groupby(receiver.got, lambda got: got[0])] == ["first", "p", "v", "p"]
    assert max(len(numbers) for kind, numbers in receiver.got if kind == "p") > 1


def test_a_failure_is_tried_again(tmp_path: Path):
    receiver = Receiver(refuse=lambda call: call in (1, 2))
    outbox = outbox_over(tmp_path / "q.jsonl", receiver)
    post_all(outbox, "a", "b")
    wait_until(lambda: len(receiver.got) == 2)
    assert (outbox.close(5), receiver.got, receiver.calls) == (0, [("a", [0]), ("b", [1])], 4)


def test_one_that_never_passes_does_not_hold_up_the_others_and_is_counted(tmp_path: Path):
    def deliver(kind: str, bodies: list[Body]) -> Body:
        return {} if kind != "bad" else 1 / 0

    outbox = Outbox(tmp_path / "q.jsonl", deliver, patience=QUICK)
    post_all(outbox, "a", "bad", "b")
    assert outbox.close(5) == 1
    assert [message.kind for message in Ledger.read(tmp_path / "q.jsonl").messages.values()] == ["bad"]
    failures = [line for line in spool_lines(tmp_path / "q.jsonl") if line.get("outcome") == "failed"]
    assert failures[0]["ids"] == [1]
    assert "division by zero" in failures[0]["error"]


def test_a_gate_is_tried_beyond_the_number_of_attempts(tmp_path: Path):
    receiver = Receiver(refuse=lambda call: call <= 20)
    outbox = outbox_over(tmp_path / "q.jsonl", receiver, gates=frozenset({"start"}))
    post_all(outbox, "start", "a")
    wait_until(lambda: len(receiver.got) == 2)
    assert (outbox.close(5), receiver.got) == (0, [("start", [0]), ("a", [1])])


def test_what_failed_while_open_is_tried_once_more_on_closing(tmp_path: Path):
    receiver = Receiver(refuse=lambda call: call <= QUICK.attempts)
    outbox = outbox_over(tmp_path / "q.jsonl", receiver)
    outbox.post("a", {"n": 0})
    wait_until(lambda: receiver.calls >= QUICK.attempts)
    assert (outbox.close(5), receiver.got) == (0, [("a", [0])])


def test_a_receiver_that_hangs_blocks_neither_posting_nor_closing(tmp_path: Path):
    release = threading.Event()
    outbox = Outbox(tmp_path / "q.jsonl", lambda kind, bodies: {"x": release.wait(30)}, patience=QUICK)
    started = time.monotonic()
    for number in range(2000):
        outbox.post("a", {"n": number})
    assert outbox.close(0.2) == 2000
    assert time.monotonic() - started < 5
    release.set()


def test_a_later_process_sends_what_the_earlier_one_could_not_and_nothing_twice(tmp_path: Path):
    first = outbox_over(tmp_path / "q.jsonl", Receiver(refuse=lambda call: call > 2))
    post_all(first, "a", "b", "c", "d")
    assert first.close(5) == 2
    receiver = Receiver()
    second = outbox_over(tmp_path / "q.jsonl", receiver)
    second.post("e", {"n": 4})
    assert second.close(5) == 0
    assert receiver.got == [("c", [2]), ("d", [3]), ("e", [4])]


def test_results_of_earlier_deliveries_are_there_for_the_later_process(tmp_path: Path):
    outbox = outbox_over(tmp_path / "q.jsonl", Receiver())
    post_all(outbox, "a", "b")
    outbox.close(5)
    assert Ledger.read(tmp_path / "q.jsonl").results == [{"seen": 0}, {"seen": 1}]


def test_a_line_torn_by_a_crash_costs_that_line_only(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"id":0,"kind":"a","body":{"n":0}}\n{"id":1,"kind":"a","bo')
    receiver = Receiver()
    outbox = outbox_over(path, receiver)
    outbox.post("a", {"n": 7})
    assert outbox.close(5) == 0
    assert receiver.got == [("a", [0]), ("a", [7])]


def test_posting_after_close_is_an_error(tmp_path: Path):
    outbox = outbox_over(tmp_path / "q.jsonl", Receiver())
    assert outbox.close(5) == outbox.close(5) == 0
    with pytest.raises(ValueError, match="before close"):
        outbox.post("a", {"n": 0})


def spool_lines(path: Path) -> list[Body]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def wait_until(true: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.002)
    assert true()
