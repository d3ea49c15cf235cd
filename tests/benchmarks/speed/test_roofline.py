"""The cost of forward passes alone: the prices, and the meter on a simulated clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from benchmarks.speed import benchmark as bench
from benchmarks.speed.roofline import CostMeter, Costs, compute_roofline, interpolate, row_counts
from benchmarks.speed.work import Step, Work
from stages.contract.blocks import SequenceState

if TYPE_CHECKING:
    from pipeline.assembly.models import Models

# At one row 10 and 2 more per token, at four rows 20 and 8 more per token of each row.
TARGET = {1: {1: 12.0, 2: 14.0, 3: 16.0}, 4: {1: 28.0, 2: 36.0, 3: 44.0}}
COSTS = Costs(TARGET, {1: 1.0, 4: 4.0}, reading_target=30.0, reading_drafter=3.0, prompt_tokens=10, context=20)


def work(*steps: Step, prompt_tokens: int = 10) -> Work:
    return Work(steps, 0, 0, prompt_tokens, 0.0, 0.0, 0.0, 0.0)


def test_interpolation_is_linear_and_constant_beyond_the_ends() -> None:
    points = {1: 10.0, 3: 20.0, 4: 50.0}
    assert [interpolate(points, at) for at in (0.5, 1, 2, 3, 3.5, 4, 9)] == [10.0, 10.0, 15.0, 20.0, 35.0, 50.0, 50.0]
    assert interpolate({2: 7.0}, 1) == 7.0


def test_rows_are_measured_at_powers_of_two_and_at_the_batch() -> None:
    assert [row_counts(batch) for batch in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_a_target_pass_is_priced_by_its_rows_and_its_tokens_per_row() -> None:
    assert COSTS.target_pass(1, 2) == 14.0
    assert COSTS.target_pass(4, 8) == 36.0
    assert COSTS.target_pass(4, 6) == 32.0  # 1.5 tokens of each row
    assert COSTS.target_pass(2, 4) == pytest.approx(14 + (36 - 14) / 3)


def test_each_pass_of_the_drafter_is_priced_by_the_rows_that_still_draft() -> None:
    assert COSTS.drafting(Step((3,), (2,))) == 3.0
    assert COSTS.drafting(Step((3, 1, 0, 1), (2, 1, 0, 1))) == pytest.approx(3.0 + 1.0 + 1.0)
    assert COSTS.drafting(Step((0, 0), (0, 0))) == 0.0


def test_the_target_reads_one_token_of_each_row_in_addition_to_the_proposed_ones() -> None:
    assert COSTS.verifying(Step((3,), (2,))) == 16.0
    assert COSTS.verifying(Step((3, 1, 0, 1), (2, 1, 0, 1))) == 36.0


def test_the_roofline_of_a_round_sums_its_steps_and_reads_its_prompts() -> None:
    found = compute_roofline(work(Step((2,), (1,)), Step((0,), (0,)), prompt_tokens=20), COSTS)
    assert (found.reading, found.drafting, found.verifying) == (66.0, 2.0, 26.0)
    assert found.seconds == 94.0


def test_without_drafts_the_drafter_reads_no_prompt() -> None:
    assert compute_roofline(work(Step((0,), (0,))), COSTS).reading == 30.0


@dataclass
class Clock:
    """A clock that advances only when a model works."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class PricedModel:
    """A model that keeps the rules of `LanguageModel` and takes a known time for every call."""

    device = torch.device("cpu")
    max_length = 1 << 30

    def __init__(self, clock: Clock, per_token: float, slowness: Sequence[float]) -> None:
        self._clock, self._per_token, self._slowness = clock, per_token, slowness
        self._calls = count()
        self.lengths: dict[int, int] = {}

    def _work(self, tokens: int) -> None:
        self._clock.now += (10 + self._per_token * tokens) * self._slowness[next(self._calls) % len(self._slowness)]

    def admit(self, row: SequenceState, tokens: Sequence[int]) -> None:
        self.lengths[row.offset] = len(tokens) - 1
        self._work(len(tokens) - 1)

    def forward(
        self,
        rows: Sequence[SequenceState],
        tokens: Sequence[Sequence[int]],
        wanted: Sequence[int],
        *,
        hidden: bool = False,
    ) -> None:
        assert [row.offset for row in rows] == list(self.lengths)
        assert all(1 <= count <= len(new) for count, new in zip(wanted, tokens, strict=True))
        for row, new in zip(rows, tokens, strict=True):
            self.lengths[row.offset] += len(new)
        self._work(sum(map(len, tokens)))

    def length(self, row: SequenceState) -> int:
        return self.lengths[row.offset]

    def roll_back(self, row: SequenceState, length: int) -> None:
        self.lengths[row.offset] = length

    def release(self, row: SequenceState) -> None:
        del self.lengths[row.offset]


def measure_costs(slowness: Sequence[float]) -> tuple[Costs, list[PricedModel]]:
    clock = Clock()
    models = [PricedModel(clock, per_token, slowness) for per_token in (2.0, 1.0)]
    pair = cast("Models", SimpleNamespace(target=models[0], drafter=models[1]))
    meter = CostMeter(pair, 2, 3, ([1, 2, 3], [1, 2, 3, 4, 5]), 6, clock)
    for _ in range(7):
        meter.sweep()
    return meter.costs(), models


def test_the_meter_times_every_point_at_the_context_and_leaves_no_rows() -> None:
    costs, models = measure_costs([1.0])
    assert costs.target == {1: {1: 12.0, 2: 14.0, 3: 16.0}, 2: {1: 14.0, 2: 18.0, 3: 22.0}}
    assert costs.drafter == {1: 11.0, 2: 12.0}
    assert (costs.reading_target, costs.reading_drafter) == (14.0, 14.0)
    assert (costs.prompt_tokens, costs.context) == (3, 6)
    assert [model.lengths for model in models] == [{}, {}]


def test_medians_ignore_an_outlier() -> None:
    assert measure_costs([*[1.0] * 20, 50.0])[0].target == measure_costs([1.0])[0].target


@pytest.mark.parametrize(("rounds", "expected"), [(1, [7]), (3, [3, 2, 2]), (14, [1, 0] * 7)])
def test_sweeps_are_spread_over_the_rounds_and_the_first_has_one(rounds: int, expected: list[int]) -> None:
    done: list[int] = []
    for number in range(rounds):
        bench._run_sweeps(
            cast("CostMeter", SimpleNamespace(sweep=lambda number=number: done.append(number))), number, rounds
        )
    assert [done.count(number) for number in range(rounds)] == expected


@pytest.mark.parametrize("overhead", [0.0, 5.0])
def test_the_roofline_of_a_run_is_the_time_of_its_passes_without_overhead(overhead: float) -> None:
    costs, _ = measure_costs([1.0])
    clock = Clock()
    target, drafter = PricedModel(clock, 2.0, [1.0]), PricedModel(clock, 1.0, [1.0])
    row = SequenceState(0, "", "", "", [1, 2, 3], 3, [], cast("Any", None), remaining_tokens=9)
    target.admit(row, [1, 2, 3])
    drafter.admit(row, [1, 2, 3, 4, 5])
    for drafted, proposed in ((2, 1), (0, 0), (3, 2)):
        for _ in range(drafted):
            drafter.forward([row], [[1]], [1])
        target.forward([row], [[1] * (proposed + 1)], [1])
        clock.now += overhead
    roofline = compute_roofline(work(Step((2,), (1,)), Step((0,), (0,)), Step((3,), (2,)), prompt_tokens=3), costs)
    assert roofline.seconds == clock.now - 3 * overhead
