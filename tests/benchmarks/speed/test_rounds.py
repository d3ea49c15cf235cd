"""Rounds: their size, and the order in which arms run."""

from collections.abc import Iterator, Sequence

import pytest

from benchmarks.speed.arms import ArmName, NoEngines, arms_at, require_usable
from benchmarks.speed.benchmark import measure
from benchmarks.speed.monitor import Monitor, Rounds
from benchmarks.speed.plan import SpeedPlan
from benchmarks.speed.work import MeasuredRound
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
    none = NoEngines()
    assert arms_at(1, 0.0, none) == tuple(ArmName)
    assert {"assisted", "assisted-defaults", "prompt-lookup"} == set(ArmName) - set(arms_at(2, 0.0, none))
    with pytest.raises(UsageError, match="run at batch 2 and temperature 0, but 'prompt-lookup' does not; there are"):
        require_usable(["plain", "prompt-lookup"], 2, 0.0, none)


class RecordingArm:
    """Records the prompts that it receives."""

    def __init__(self, name: str, notes: list[tuple[str, tuple[int, ...]]]) -> None:
        self._name, self._notes = name, notes

    def complete(self, prompts: Sequence[PromptReceived]) -> MeasuredRound:
        self._notes.append((self._name, tuple(prompt.offset for prompt in prompts)))
        return MeasuredRound(((1,),) * len(prompts), 1.0)

    def close(self) -> None:
        raise AssertionError("the code that made the arm closes it")


class RecordingMonitor(Monitor):
    """Records steps and turns."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str, int, int]] = []
        self.turns: list[tuple[str, int, int]] = []

    def start_step(self, phase: str, what: str, number: int = 1, total: int = 1) -> None:
        self.steps.append((phase, what, number, total))

    def finish_turn(self, name: str, rounds: Rounds, planned: int) -> None:
        self.turns.append((name, len(rounds[name]), planned))


def rotation() -> Iterator[tuple[str, tuple[int, ...]]]:
    arms = [ArmName.PLAIN, ArmName.FROZEN, ArmName.LEARNING]
    for number in range(3):
        offsets = 7 + 2 * number, 8 + 2 * number
        yield from ((arms[(number + place) % 3], offsets) for place in range(3))


def test_every_arm_takes_its_turn_at_every_place_and_those_of_ours_warm_up_longer() -> None:
    notes: list[tuple[str, tuple[int, ...]]] = []
    monitor = RecordingMonitor()
    between: list[tuple[int, int]] = []
    arms = {name: RecordingArm(name, notes) for name in (ArmName.PLAIN, ArmName.FROZEN, ArmName.LEARNING)}
    prompts = [PromptReceived(offset, str(offset), "tiny", offset + 1, "text") for offset in range(13)]
    found = measure(
        arms,
        prompts,
        SpeedPlan(tuple(arms), round_prompts=2, rounds=3, warm_up=7),
        monitor,
        lambda number: between.append((number, len(notes))),
    )
    rehearsals = [("plain", offsets) for offsets in ((4, 5), (6,))]
    whole = [(name, offsets) for name in ("frozen", "learning") for offsets in ((0, 1), (2, 3), (4, 5), (6,))]
    assert notes == [*rehearsals, *whole, *rotation()]
    warm_up = [("warm-up", "plain, 3 prompts", 1, 3), ("warm-up", "frozen, 7 prompts", 2, 3)]
    assert monitor.steps[:2] == warm_up
    assert monitor.steps[2:] == [
        ("warm-up", "learning, 7 prompts", 3, 3),
        ("measuring", "3 rounds of 2 prompts in 3 arms", 1, 1),
    ]
    assert monitor.turns == [(name, 1 + place // 3, 3) for place, (name, _) in enumerate(rotation())]
    assert between == [(0, 10), (1, 13), (2, 16)]
    assert {name: len(rounds) for name, rounds in found.items()} == dict.fromkeys(arms, 3)


class InterruptedArm(RecordingArm):
    """Raises an interrupt when it receives the prompt with this offset."""

    def __init__(self, offset: int) -> None:
        super().__init__("interrupted", [])
        self._offset = offset

    def complete(self, prompts: Sequence[PromptReceived]) -> MeasuredRound:
        if prompts[0].offset == self._offset:
            raise KeyboardInterrupt
        return super().complete(prompts)


@pytest.mark.parametrize(("offset", "complete"), [(2, 1), (4, 2)])
def test_ctrl_c_keeps_the_rounds_that_all_arms_have_finished(offset: int, complete: int) -> None:
    arms = {"plain": RecordingArm("plain", []), "memory": InterruptedArm(offset)}
    prompts = [PromptReceived(number, str(number), "tiny", number + 1, "text") for number in range(6)]
    plan = SpeedPlan(tuple(arms), round_prompts=2, rounds=3, warm_up=0)
    found = measure(arms, prompts, plan, RecordingMonitor(), lambda number: None)
    assert {name: len(rounds) for name, rounds in found.items()} == {"plain": complete, "memory": complete}
