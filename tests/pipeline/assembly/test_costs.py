"""The costs that decide what is drafted and how often is learned, by the setting `draft.costs`."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipeline.assembly.costs import make_costs
from pipeline.assembly.training import TRAIN_SHARE, piece_cost
from pipeline.config.sections import DraftSettings
from stages.drafting.costs import Costs
from stages.drafting.tracked_costs import TrackedCosts
from stages.sampling.params import SamplingParams

BATCH = 2


def make_model(parameters: int) -> SimpleNamespace:
    return SimpleNamespace(parameters=parameters, layers=0, device=torch.device("cpu"))


MODELS = cast("Any", SimpleNamespace(target=make_model(100), drafter=make_model(5)))


def costs_of(**draft: Any) -> tuple[Any, Costs | None]:
    def refuse() -> Any:
        raise AssertionError("nothing is measured")

    return make_costs(DraftSettings(**draft), SamplingParams(), BATCH, MODELS, 9, refuse)


def test_a_number_is_the_cost_of_a_piece_in_target_passes():
    costs, seconds = costs_of(costs=0.25)
    assert costs.drafting_cost(BATCH) == 0.25 * costs.verification_cost(BATCH)
    assert seconds is None
    assert piece_cost(0.25, []) == TRAIN_SHARE * 0.25


def test_estimated_costs_are_those_of_the_sizes():
    costs, seconds = costs_of(costs="estimated")
    assert costs.drafting_cost(BATCH) == pytest.approx(0.05 * costs.verification_cost(BATCH))
    assert seconds is None


def test_without_drafts_nothing_is_measured():
    costs, seconds = costs_of(costs="tracked", max_draft=0)
    assert isinstance(costs, TrackedCosts)
    assert seconds is None
    assert isinstance(costs_of(costs="measured", max_draft=0)[0], Costs)
