"""The costs that decide what is drafted and how often is learned, by the setting `draft.costs`."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipeline.assembly.costs import FORMAT, estimate_costs, make_costs
from pipeline.assembly.training import TRAIN_SHARE, piece_cost
from pipeline.config.sections import DraftSettings
from stages.drafting.costs import BlockTimes, CostModel, Costs
from stages.drafting.tracked_costs import KNOWN, TrackedCosts
from stages.engine.forward_pass.measurements import Measurements
from stages.sampling.params import SamplingParams

BATCH = 2
TRUTH = Costs(((2, 0.040), (4, 0.044)), ((1, 0.002), (2, 0.002)), around=0.001)  # of the machine


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path))


def make_models(layers: int = 4, measurements: Measurements | None = None) -> Any:
    def make_model(parameters: int) -> SimpleNamespace:
        return SimpleNamespace(
            parameters=parameters,
            layers=layers,
            hidden_size=8,
            vocabulary_size=9,
            adapter=None,
            weights="fastest",
            model=SimpleNamespace(dtype=torch.float32, modules=lambda: [torch.nn.Linear(8, 9)]),
            forward_pass=SimpleNamespace(name="packed forward, some kernels"),
            device=torch.device("cpu"),
            measurements=measurements or Measurements(),
        )

    return cast("Any", SimpleNamespace(target=make_model(10**8), drafter=make_model(10**7)))


def costs_of(models: Any = None, batch: int = BATCH, **draft: Any) -> tuple[Any, Costs | None]:
    return make_costs(DraftSettings(**draft), SamplingParams(), batch, models or make_models())


def run(costs: CostModel, truth: Costs = TRUTH, blocks: int = 2 * KNOWN) -> None:
    """Run so many blocks of two rows on a machine with these costs, with drafts of no, one, two and four pieces."""
    for number in range(blocks):
        lengths = [(0, 1, 2, 4)[number % 4]] * 2
        tokens = 2 + sum(lengths)
        passes = truth.verification_cost(tokens) - truth.around
        costs.observe(BlockTimes(lengths, tokens, truth.drafts_cost(lengths), passes, truth.around))


def ratios(costs: CostModel) -> list[float]:
    found = [costs.verification_cost(8), costs.drafts_cost([2, 2])]
    return [cost / costs.verification_cost(2) for cost in found]


def test_a_number_is_the_cost_of_a_piece_in_target_passes():
    costs, seconds = costs_of(costs=0.25)
    assert costs.drafting_cost(BATCH) == 0.25 * costs.verification_cost(BATCH)
    assert seconds is None
    assert piece_cost(0.25, []) == TRAIN_SHARE * 0.25


def test_estimated_costs_are_those_of_the_bytes_and_the_operations():
    costs, seconds = costs_of(costs="estimated")
    assert isinstance(costs, Costs)
    assert seconds is None
    more = costs.verification_cost(2 * BATCH) - costs.verification_cost(BATCH)
    assert more == pytest.approx(2 * 10**8 * BATCH / 6e11), "two operations for each weight and token"
    rest = costs.around + 4 * 1e-5
    assert costs.verification_cost(BATCH) - more - rest == pytest.approx(4 * 10**8 / 2e10), "four bytes a weight"
    assert costs.drafting_cost(BATCH) == pytest.approx(0.25 * 4 * 10**7 / 2e10 + more / 10 + 4 * 1e-5)


def test_estimated_costs_are_the_same_whatever_earlier_runs_took():
    run(costs_of()[0])
    assert costs_of(costs="estimated") == (estimate_costs(make_models(), BATCH), None)


def test_the_first_run_begins_with_the_estimate_and_corrects_it():
    costs, seconds = costs_of()
    assert seconds is None
    assert ratios(costs) == ratios(estimate_costs(make_models(), BATCH))
    begun = ratios(costs)
    run(costs, blocks=100)
    assert ratios(costs) == pytest.approx(ratios(TRUTH), rel=0.1)
    assert begun[1] < 0.7 * ratios(TRUTH)[1], "it was wrong"


def test_a_later_run_begins_with_what_the_first_one_found():
    run(costs_of()[0])
    costs, seconds = costs_of()
    assert seconds is not None
    assert ratios(seconds) == pytest.approx(ratios(TRUTH), rel=0.05)
    assert seconds.verification_cost(2) == pytest.approx(TRUTH.verification_cost(2), rel=0.05), "in seconds"
    for own, found, guess in zip(
        ratios(costs), ratios(seconds), ratios(estimate_costs(make_models(), BATCH)), strict=True
    ):
        assert min(found, guess) < own < max(found, guess)


def test_the_newest_run_wins():
    run(costs_of()[0])
    slower = replace(TRUTH, drafter=((1, 0.004), (2, 0.004)))
    run(costs_of()[0], slower)
    _, seconds = costs_of()
    assert seconds is not None
    assert ratios(seconds) == pytest.approx(ratios(slower), rel=0.1)
    assert 2 * ratios(TRUTH)[1] == pytest.approx(ratios(slower)[1])


def test_what_a_busy_run_found_does_not_last_though_it_is_not_tried_again():
    run(costs_of()[0], replace(TRUTH, drafter=((1, 0.040), (2, 0.040))))
    found = []
    for _ in range(5):
        costs, _ = costs_of()
        found.append(costs.drafting_cost(2) / costs.verification_cost(2))
        for _ in range(KNOWN):
            costs.observe(BlockTimes([0, 0], 2, 0.0, 0.040, 0.001))
    estimated = estimate_costs(make_models(), BATCH)
    assert found == sorted(found, reverse=True)
    assert found[0] > 2 * found[-1]
    assert found[-1] < 1.1 * estimated.drafting_cost(2) / estimated.verification_cost(2)


def test_a_short_run_is_not_remembered():
    run(costs_of()[0], blocks=KNOWN - 1)
    assert costs_of()[1] is None


@pytest.mark.parametrize("draft", [{"costs": "estimated"}, {"costs": 0.5}, {"max_draft": 0}])
def test_only_tracked_costs_of_drafting_are_remembered(draft: dict[str, Any]):
    run(costs_of(**draft)[0])
    assert costs_of()[1] is None


def test_another_shape_batch_or_number_of_threads_is_another_machine():
    run(costs_of()[0])
    threads = torch.get_num_threads()
    assert costs_of(make_models(layers=5))[1] is None
    assert costs_of(batch=3)[1] is None
    try:
        torch.set_num_threads(threads + 1)
        assert costs_of()[1] is None
    finally:
        torch.set_num_threads(threads)
    assert costs_of()[1] is not None


def test_costs_of_another_format_are_not_read(monkeypatch: pytest.MonkeyPatch):
    run(costs_of()[0])
    monkeypatch.setattr("pipeline.assembly.costs.FORMAT", FORMAT + 1)
    assert costs_of()[1] is None


def test_a_run_that_resumes_begins_with_the_costs_that_it_began_with():
    """Whatever others found meanwhile: both where nothing was remembered, and where something was."""
    first = Measurements({})
    costs_of(make_models(measurements=first))
    run(costs_of()[0])
    assert costs_of(make_models(measurements=Measurements(dict(first.recorded or {}))))[1] is None
    second = Measurements({})
    began, seconds = costs_of(make_models(measurements=second))
    run(costs_of()[0], replace(TRUTH, drafter=((1, 0.020), (2, 0.020))))
    resumed, again = costs_of(make_models(measurements=Measurements(dict(second.recorded or {}))))
    assert again == seconds
    assert resumed.start == began.start
    assert costs_of()[1] != seconds


def test_without_drafts_costs_are_estimated():
    costs, seconds = costs_of(max_draft=0)
    assert isinstance(costs, TrackedCosts)
    assert seconds is None
    assert isinstance(costs_of(costs="estimated", max_draft=0)[0], Costs)
