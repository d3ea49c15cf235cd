"""When the drafter is updated: intervals, what an update receives, and what the ledger records."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from typing_extensions import override

from stages.contract.blocks import TrainingExample
from stages.learn.training.interval import BreakEvenInterval, UpdateInterval
from stages.learn.training.scheduler import InlineWorker, ThreadWorker, UpdateScheduler
from stages.learn.training.update import Assignment, Attempt, Pace, Step
from store.events import Updated


def step_of(before: float | None = 0.5, after: float | None = 0.6, *, served: bool = True, pieces: int = 100) -> Step:
    return Step(1.5, 40, pieces, before, after, 0.4, served, "as given")


class Trainer:
    """Records the examples that it gets."""

    loss_name = "trie"

    def __init__(self, step: Step) -> None:
        self.version = self.drifts = 0
        self.held_out: list[int] = []
        self.kept: list[int] = []
        self.updates: list[list[int]] = []
        self.dropped: list[str] = []
        self._step = step

    def add_to_replay(self, example: TrainingExample) -> None:
        self.kept.append(example.offset)

    def hold_out(self, example: TrainingExample) -> None:
        self.held_out.append(example.offset)

    def assign(self, fresh: Sequence[TrainingExample]) -> Assignment:
        self.updates.append([example.offset for example in fresh])
        return Assignment(tuple(fresh), ())

    def attempt(self, assignment: Assignment) -> Attempt:
        return Attempt(self._step, {}, {})

    def respond_to_drift(self) -> None:
        self.drifts += 1

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: None) -> None:
        pass

    def settle(self, attempt: Attempt) -> Step:
        self.version += attempt.step.served
        return attempt.step

    def drop(self, attempt: Attempt, reason: str) -> Step:
        self.dropped.append(reason)
        return replace(attempt.step, served=False, reason=reason)


class Spacing(UpdateInterval):
    """Records its calls."""

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self.observed: list[tuple[int, int]] = []
        self.restarts = 0

    def observe_update(self, step: Step, tokens: int, prompts: int) -> None:
        self.observed.append((tokens, prompts))

    def restart(self) -> None:
        self.restarts += 1


def example_of(offset: int, judged: int = 10, target: str = "big", copied: int = 0) -> TrainingExample:
    ten_tokens = SimpleNamespace(positions=range(10))
    return TrainingExample(offset, target, (1, 2), ten_tokens, (), (), judged, copied=copied)  # type: ignore[arg-type]


def learner_of(
    interval: int, gate_every: int = 99, step: Step | None = None, most: int = 99, lag: int = 0
) -> tuple[UpdateScheduler, Trainer, Spacing]:
    trainer, interval = Trainer(step or step_of()), Spacing(interval)
    worker = ThreadWorker() if lag else InlineWorker()
    return UpdateScheduler(trainer, interval, gate_every, most, lag, worker), trainer, interval  # type: ignore[arg-type]


def learn(scheduler: UpdateScheduler, example: TrainingExample) -> Updated | None:
    adopted = scheduler.add(example)
    return scheduler.update_if_due() or adopted


def test_the_example_that_completes_the_interval_brings_the_update():
    learner, trainer, interval = learner_of(3)
    updated = [learn(learner, example_of(offset)) for offset in range(7)]
    assert [update.offset for update in updated if update] == [2, 5]
    assert trainer.updates == [[0, 1, 2], [3, 4, 5]]
    assert interval.observed == [(30, 3), (30, 3)]


def test_tokens_of_copied_drafts_are_no_benefit():
    learner, _, interval = learner_of(3)
    for offset in range(6):
        learn(learner, example_of(offset, copied=7 if offset < 3 else 0))
    assert interval.observed == [(9, 3), (30, 3)]


def test_some_prompts_become_examples_where_updates_are_far_apart():
    """A sixteenth of them, also of every second prompt, and each counts as 16; all where they gain."""
    trainer, interval = Trainer(step_of()), Spacing(32)
    scheduler = UpdateScheduler(trainer, interval, 99, 99, 0, InlineWorker())  # type: ignore[arg-type]
    assert all(map(scheduler.wants_example, range(200)))
    interval.is_exploring = True
    for offsets in (range(4000), range(0, 4000, 2), range(1, 4000, 2)):
        assert sum(map(scheduler.wants_example, offsets)) == pytest.approx(len(offsets) / 16, rel=0.02)
    updated = [learn(scheduler, example_of(offset)) for offset in (3, 9)]
    assert [update is not None for update in updated] == [False, True]
    assert interval.observed == [(320, 32)]
    assert learn(scheduler, example_of(20)) is None
    updated = [learn(scheduler, example_of(20)) for _ in range(16)]  # later parts of its answer: 16 and 1 each
    assert [update is not None for update in updated] == [False] * 15 + [True]


def test_a_long_interval_s_update_learns_from_the_newest_examples_and_keeps_the_others():
    learner, trainer, _ = learner_of(6, most=2)
    for offset in range(12):
        learn(learner, example_of(offset))
    assert trainer.updates == [[4, 5], [10, 11]]
    assert trainer.kept == [0, 1, 2, 3, 6, 7, 8, 9]


def test_an_update_reports_its_result_and_its_ledger():
    """Thirty tokens were judged since the last update, each a tenth likelier to be accepted than with the baseline."""
    learner, _, _ = learner_of(3, step=Step(1.5, 40, 100, 0.5, 0.6, 0.4, True, "as given"))
    update, second = [made for offset in range(6) if (made := learn(learner, example_of(offset)))]
    assert (update.part, update.loss_name, update.loss, update.positions) == ("drafter", "trie", 1.5, 40)
    assert (update.acceptance_before, update.acceptance_after, update.acceptance_baseline) == (0.5, 0.6, 0.4)
    assert update.tokens_gained == pytest.approx((0.5 - 0.4) * 30)
    assert (update.served, update.reason, update.target, update.drafter_version) == (True, "as given", "big", 1)
    assert update.seconds >= 0
    assert second.drafter_version == 2


def test_the_tokens_gained_are_those_of_the_drafter_that_drafted_them():
    """Not of the candidate: it had drafted nothing yet. All examples count, held-out ones too."""
    learner, trainer, _ = learner_of(4, gate_every=2, step=Step(1.0, 1, 1, 0.7, 0.1, 0.45, False, "dropped"))
    update = [learn(learner, example_of(offset, judged=4 + offset)) for offset in range(4)][-1]
    assert trainer.updates == [[0, 2]]
    assert update.tokens_gained == pytest.approx((0.7 - 0.45) * (4 + 5 + 6 + 7))
    assert update.served is False


def test_each_target_has_its_share_of_held_out_examples():
    """With prompts routed in turn, every fourth example is always the same target's."""
    learner, trainer, _ = learner_of(4, gate_every=4)
    for offset in range(16):
        learn(learner, example_of(offset, target="ab"[offset % 2]))
    assert trainer.held_out == [6, 7, 14, 15]


def list_updates(learner: UpdateScheduler, examples: int) -> list[tuple[int, Updated]]:
    """The updates, each with the example at which it was reported."""
    updates = [(offset, learn(learner, example_of(offset))) for offset in range(examples)]
    return [(offset, update) for offset, update in updates if update]


@pytest.mark.parametrize(
    ("lag", "adopted", "learned"),
    [
        (0, [(2, 2), (5, 5), (8, 8)], [2, 5, 8]),
        (1, [(3, 2), (6, 5), (9, 8)], [2, 5, 8]),
        (3, [(5, 2), (8, 5)], [2, 5, 8]),  # the third is under way when the stream ends
        (4, [(6, 2)], [2, 6]),  # one at a time: the next waits until the one before is adopted
    ],
)
def test_an_update_is_adopted_a_fixed_number_of_examples_later(
    lag: int, adopted: list[tuple[int, int]], learned: list[int]
):
    learner, trainer, interval = learner_of(3, lag=lag)
    updates = list_updates(learner, 10)
    assert [(at, update.offset) for at, update in updates] == adopted
    assert [offsets[-1] for offsets in trainer.updates] == learned
    assert [offset for offsets in trainer.updates for offset in offsets] == list(range(learned[-1] + 1))
    assert [update.drafter_version for _, update in updates] == list(range(1, len(adopted) + 1))
    assert len(interval.observed) == len(adopted)


def test_at_the_end_an_update_that_is_under_way_is_waited_for_and_adopted():
    learner, trainer, interval = learner_of(2, lag=2)
    assert list_updates(learner, 3) == []
    update = learner.finish()
    assert (update.offset, update.served, update.drafter_version, trainer.version) == (1, True, 1, 1)
    assert interval.observed == [(20, 2)]
    assert learner.finish() is None


def slow_down(trainer: Trainer, until: Callable[[], object]) -> None:
    attempt = trainer.attempt
    trainer.attempt = lambda assignment: (until(), attempt(assignment))[1]


def test_a_slow_worker_changes_nothing_but_what_was_waited():
    quick, slow = learner_of(3, lag=2), learner_of(3, lag=2)
    slow_down(slow[1], lambda: time.sleep(0.2))
    one, other = list_updates(quick[0], 8), list_updates(slow[0], 8)
    untimed = [[(at, replace(update, seconds=0.0, waited=0.0)) for at, update in made] for made in (one, other)]
    assert len(one) == 2
    assert untimed[0] == untimed[1]
    assert min(update.waited for _, update in other) > 0


def test_examples_come_in_while_an_update_is_under_way():
    learner, trainer, _ = learner_of(2, gate_every=3, lag=2)
    proceed = Event()
    slow_down(trainer, lambda: proceed.wait(60))
    learn(learner, example_of(0))
    learn(learner, example_of(1))
    assert learn(learner, example_of(2)) is None
    assert (trainer.held_out, trainer.version) == ([2], 0)
    proceed.set()
    assert learn(learner, example_of(3)).served


def test_a_restart_drops_an_update_that_is_under_way_and_reports_it():
    learner, trainer, interval = learner_of(2, lag=2)
    list_updates(learner, 2)
    dropped = learner.restart()
    assert (dropped.offset, dropped.served, dropped.drafter_version) == (1, False, 0)
    assert trainer.dropped == [dropped.reason] == ["a drift was noticed while it was under way"]
    assert (interval.observed, interval.restarts) == ([], 1)
    assert learner.restart() is None
    assert [at for at, _ in list_updates(learner, 4)] == [3], "and learning continues"


def test_each_target_takes_what_an_update_shows_of_it_once():
    learner, trainer, _ = learner_of(1)
    lessons = {"big": (torch.eye(2), torch.tensor([0.25, 1.0]))}
    trainer.attempt = lambda assignment: Attempt(step_of(), {}, {}, lessons)  # type: ignore[method-assign]
    learn(learner, example_of(0))
    assert learner.take_labels("other") == []
    again, _, _ = learner_of(1)
    again.load_state_dict(learner.state_dict())
    for one in (learner, again):
        labels = one.take_labels("big")
        assert [label.acceptance for label in labels] == [0.25, 1.0]
        assert torch.equal(torch.stack([label.features_F for label in labels]), torch.eye(2))
        assert one.take_labels("big") == []
    learn(learner, example_of(1))
    learner.restart()
    assert learner.take_labels("big") == [], "they are of the text before the drift"


def test_what_the_worker_raises_is_raised_where_the_update_would_have_been_adopted():
    learner, trainer, _ = learner_of(1, lag=2)

    def fail() -> None:
        raise ArithmeticError("of the worker")

    slow_down(trainer, fail)
    learn(learner, example_of(0))
    assert learn(learner, example_of(1)) is None
    with pytest.raises(ArithmeticError, match="of the worker") as raised:
        learn(learner, example_of(2))
    assert "fail" in [entry.name for entry in raised.traceback]
    assert learner.finish() is None, "it is raised once"


def paying(**changes: float) -> BreakEvenInterval:
    """An update of 100 pieces costs 100 x 2 x 0.1 = 20 target passes. A thousand prompts have passed."""
    usual = {"interval": 4, "longest": 32, "steps": 2, "horizon": 100, "piece_cost": 0.1, "batch": 1}
    interval = BreakEvenInterval(**usual | changes)  # type: ignore[arg-type]
    interval.observe_update(step_of(None, None), 0, 1000)
    return interval


def test_updates_that_gain_nothing_wait_until_they_cost_a_quarter_and_then_a_fiftieth():
    """An update of 100 pieces costs 20 target passes: a fiftieth of those of 1,000 tokens, in rows of two of 2,000."""
    for batch, enough in ((1, 1000), (2, 2000)):
        interval = paying(batch=batch)
        early = 2 * enough // 25
        assert [interval.is_due(tokens, 4) for tokens in (early - 1, early)] == [False, True], "no gain is known yet"
        interval.observe_update(step_of(None, None, served=False), 40, 4)
        assert not interval.is_exploring, "the first one had few examples"
        interval.interval = 4
        assert [interval.is_due(tokens, 4) for tokens in (early - 1, early)] == [False, True]
        interval.observe_update(step_of(None, None, served=False), 40, 4)
        assert interval.is_exploring
        assert [interval.is_due(tokens, 100) for tokens in (enough - 1, enough)] == [False, True]
        assert not interval.is_due(enough, 7), "and the interval is doubled"
        interval.restart()
        assert interval.is_due(0, 4), "after a drift the text is another one"
        interval.observe_update(step_of(0.5, 0.6), 40, 4)
        assert interval.is_due(0, 8)


class SetPace(Pace):
    """Free or not, as it is set."""

    free = False

    @property
    @override
    def is_free(self) -> bool:
        return self.free


def test_while_time_is_free_the_shortest_interval_holds_and_updates_cost_nothing():
    """Two useless updates make the next one wait; those in free time are made all the same, and make none wait."""
    trainer, pace, interval = Trainer(step_of(0.5, 0.5, served=False)), SetPace(), paying()
    scheduler = UpdateScheduler(trainer, interval, 99, 99, 0, InlineWorker(), pace, sampled=1)  # type: ignore[arg-type]
    updated = [learn(scheduler, example_of(offset)) for offset in range(30)]
    assert sum(update is not None for update in updated) == 2
    assert scheduler.update_if_due() is None
    pace.free = True
    update = scheduler.update_if_due()
    assert update is not None
    assert update.reason == "idle: as given"
    assert scheduler.update_if_due() is None, "nothing waits"
    updated = [learn(scheduler, example_of(offset)) for offset in range(30, 38)]
    assert [update is not None for update in updated] == 2 * [False, False, False, True]
    assert interval.is_exploring
    assert interval.is_due(0, 32), "for what was free, no other update waits"
    scheduler.held = 1
    assert [learn(scheduler, example_of(offset)) for offset in range(38, 50)] == 12 * [None]
    assert scheduler.update_if_due() is None


def test_what_an_update_slept_is_not_its_cost():
    pace = SetPace()

    class Sleeping(Trainer):
        def attempt(self, assignment: Assignment) -> Attempt:
            pace.slept += 1000.0
            return super().attempt(assignment)

    trainer = Sleeping(step_of())
    scheduler = UpdateScheduler(trainer, Spacing(1), 99, 99, 0, InlineWorker(), pace)  # type: ignore[arg-type]
    update = learn(scheduler, example_of(0))
    assert update is not None
    assert update.seconds < 0.0


def test_the_benefit_of_an_update_is_counted_over_as_many_prompts_as_there_were():
    """Each would be worth 30 passes over 100 prompts; over 4, 12 and 28 it is worth 1.2, 3.6 and 8.4."""
    interval = paying()
    interval.restart()
    intervals = []
    for _ in range(3):
        interval.observe_update(step_of(0.5, 0.53), 10 * interval.interval, interval.interval)
        intervals.append(interval.interval)
    assert intervals == [8, 16, 32]
    interval.observe_update(step_of(0.5, 0.53), 720, 72)
    assert interval.interval == 16


def test_a_benefit_lasts_as_long_as_the_stream_where_that_is_known():
    """Each is worth .03 x 40 x 10 = 12 passes at 40 prompts left, and costs 20; at 80 prompts left it is worth 24."""
    for left, next_interval in ((40, 8), (80, 4)):
        interval = BreakEvenInterval(4, 2, 0.1, 1, prompts=left + 4)
        interval.observe_update(step_of(0.5, 0.53), 40, 4)
        assert interval.interval == next_interval
        interval.restart()
        interval.observe_update(step_of(0.5, 0.53), 40, 4)
        assert interval.interval == 8 if left == 40 else 4, "a drift does not shorten the stream"


def test_updates_that_do_not_repay_themselves_are_spaced_twice_as_far_up_to_the_longest():
    """Each is worth 0.01 x 100 x 40 / 4 = 10 passes and costs 20."""
    interval = paying()
    intervals = []
    for _ in range(5):
        interval.observe_update(step_of(0.5, 0.51), 40, 4)
        intervals.append(interval.interval)
    assert intervals == [8, 16, 32, 32, 32]


def test_updates_that_repay_themselves_are_spaced_half_as_far_down_to_the_shortest():
    """Each is worth 0.03 x 100 x 10 = 30 passes."""
    interval = paying()
    interval.interval = 32
    intervals = []
    for _ in range(4):
        interval.observe_update(step_of(0.5, 0.53), 40, 4)
        intervals.append(interval.interval)
    assert intervals == [16, 8, 4, 4]


@pytest.mark.parametrize(
    ("gain", "tokens", "prompts", "pieces", "changes", "pays"),
    [
        (0.021, 40, 4, 100, {}, True),  # 21 > 20
        (0.019, 40, 4, 100, {}, False),
        (0.03, 40, 4, 100, {"batch": 2}, False),  # two prompts share a pass: 15
        (0.03, 40, 4, 100, {"batch": 1}, True),
        (0.03, 80, 4, 200, {}, True),  # 60 > 40
        (0.03, 40, 8, 100, {}, False),  # 5 tokens per prompt: 15
        (0.01, 40, 4, 100, {"horizon": 300}, True),  # 30
        (0.03, 40, 4, 100, {"piece_cost": 0.2}, False),  # 40
        (0.03, 40, 4, 100, {"steps": 4}, False),  # 40
    ],
)
def test_whether_an_update_pays(gain, tokens, prompts, pieces, changes, pays):
    interval = paying(interval=1, **changes)
    interval.interval = 8
    interval.observe_update(step_of(0.5, 0.5 + gain, pieces=pieces), tokens, prompts)
    assert interval.interval == (4 if pays else 16)


def test_gains_are_smoothed_by_halves_and_a_dropped_update_gained_nothing():
    """Worth 10 passes per hundredth: 60, then (60 + 0) / 2 = 30, then 15; the cost is 20."""
    interval = paying(interval=1)
    interval.interval = 16
    intervals = []
    for step in (step_of(0.5, 0.56), step_of(0.5, 0.4, served=False), step_of(0.5, 0.4, served=False)):
        interval.observe_update(step, 40, 4)
        intervals.append(interval.interval)
    assert intervals == [8, 4, 8]


def test_after_a_drift_the_shortest_interval_is_back_and_gains_are_forgotten():
    interval = paying(interval=2)
    for _ in range(3):
        interval.observe_update(step_of(0.5, 0.505), 40, 4)
    assert interval.interval == 16
    interval.restart()
    assert interval.interval == 2
    interval.interval = 8
    interval.observe_update(step_of(None, None), 0, 100)
    interval.observe_update(step_of(0.5, 0.53), 40, 4)
    assert interval.interval == 4, "with the small gains before, the mean would not pay"
