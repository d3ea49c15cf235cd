"""Rounds: how large they are, and the order in which arms run."""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from pipeline.bench.engines.engines import OtherEngines
from pipeline.bench.speed.arms import ArmName, arms_at, chunks, require_usable
from pipeline.bench.speed.benchmark import SpeedPlan, measure
from pipeline.bench.speed.build import processor_seconds
from pipeline.run.rounds import Round
from store.errors import UsageError
from store.events import PromptReceived


def test_a_plan_has_whole_rounds() -> None:
    assert SpeedPlan.from_options(["plain"], 1, None, None, 5) == SpeedPlan(
        ("plain",), round_prompts=8, rounds=10, warm_up=5
    )
    assert SpeedPlan.from_options(["plain"], 8, None, None, 5) == SpeedPlan(
        ("plain",), round_prompts=16, rounds=10, warm_up=5
    )
    made = SpeedPlan.from_options(["plain"], 8, 33, None, 0)
    assert (made.rounds, made.prompts) == (3, 48)
    assert SpeedPlan.from_options(["plain"], 8, 33, 11, 0).prompts == 33


def test_assisted_arms_run_at_batch_one_only() -> None:
    none = OtherEngines(None, None)
    assert arms_at(1, 0.0, none) == tuple(ArmName)
    assert {"assisted", "assisted-defaults", "prompt-lookup"} == set(ArmName) - set(arms_at(2, 0.0, none))
    with pytest.raises(UsageError, match="run at batch 2 and temperature 0, but 'prompt-lookup' does not; there are"):
        require_usable(["plain", "prompt-lookup"], 2, 0.0, none)


class NotingArm:
    """Writes down which prompts it was given."""

    def __init__(self, name: str, notes: list[tuple[str, tuple[int, ...]]]) -> None:
        self._name, self._notes = name, notes

    def complete(self, prompts: Sequence[PromptReceived]) -> Round:
        self._notes.append((self._name, tuple(prompt.offset for prompt in prompts)))
        return Round(((1,),) * len(prompts), 1.0)

    def close(self) -> None:
        raise AssertionError("whoever made the arm closes it")


def rotation() -> Iterator[tuple[str, tuple[int, ...]]]:
    arms = [ArmName.PLAIN, ArmName.FROZEN, ArmName.LEARNING]
    for number in range(3):
        offsets = 7 + 2 * number, 8 + 2 * number
        yield from ((arms[(number + place) % 3], offsets) for place in range(3))


def test_every_arm_takes_its_turn_at_every_place_and_those_of_ours_warm_up_longer() -> None:
    notes: list[tuple[str, tuple[int, ...]]] = []
    steps: list[tuple[int, int]] = []
    between: list[tuple[int, int]] = []
    arms = {name: NotingArm(name, notes) for name in (ArmName.PLAIN, ArmName.FROZEN, ArmName.LEARNING)}
    prompts = [PromptReceived(offset, str(offset), "tiny", offset + 1, "text") for offset in range(13)]
    found = measure(
        arms,
        prompts,
        SpeedPlan(tuple(arms), round_prompts=2, rounds=3, warm_up=7),
        lambda what, done, all_steps: steps.append((done, all_steps)),
        lambda number: between.append((number, len(notes))),
    )
    rehearsals = [("plain", offsets) for offsets in ((4, 5), (6,))]
    whole = [(name, offsets) for name in ("frozen", "learning") for offsets in ((0, 1), (2, 3), (4, 5), (6,))]
    assert notes == [*rehearsals, *whole, *rotation()]
    assert steps == [(done, 19) for done in range(1, 20)]
    assert between == [(0, 10), (1, 13), (2, 16)]
    assert {name: len(rounds) for name, rounds in found.items()} == dict.fromkeys(arms, 3)


def test_chunks_keep_the_order_and_the_rest() -> None:
    prompts = [PromptReceived(offset, "", "", 1, "") for offset in range(5)]
    assert [[prompt.offset for prompt in chunk] for chunk in chunks(prompts, 2)] == [[0, 1], [2, 3], [4]]


def test_the_processor_time_of_another_thread_grows_with_its_work() -> None:
    go_on, done, end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait()
        sum(range(300_000))
        done.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    before = processor_seconds(thread)
    go_on.set()
    done.wait()
    assert processor_seconds(thread) > before or not hasattr(time, "pthread_getcpuclockid")
    end.set()
    thread.join()
    assert processor_seconds(threading.Thread()) == 0
