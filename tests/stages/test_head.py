"""The acceptance head and the rules by which a draft stops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.head import (
    EXTRA_FEATURES,
    AcceptanceHead,
    CostStop,
    FixedLength,
    ThresholdStop,
    load_head,
    piece_features,
    save_head,
)
from store.errors import ModelError

WIDTH = 6
chances = st.lists(st.floats(0.01, 1), min_size=1, max_size=8)


def survival_of(acceptances: list[float]) -> tuple[float, ...]:
    survival = [1.0]
    for acceptance in acceptances:
        survival.append(survival[-1] * acceptance)
    return tuple(survival[1:])


def features(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, WIDTH + EXTRA_FEATURES, generator=torch.Generator().manual_seed(seed))


@given(chances)
def test_a_fixed_length_always_goes_on(acceptances: list[float]):
    assert FixedLength().goes_on(survival_of(acceptances))


def test_a_threshold_stops_where_a_rejection_is_likelier_than_it():
    rule = ThresholdStop(0.7)
    assert rule.goes_on((0.9, 0.5, 0.31))
    assert not rule.goes_on((0.9, 0.5, 0.29))
    assert ThresholdStop(0.5).goes_on((0.5,)), "exactly the threshold is not above it"


@given(chances, st.floats(0.01, 1))
def test_the_cost_rule_goes_on_while_a_longer_draft_emits_more_per_second(acceptances: list[float], cost: float):
    survival = survival_of(acceptances)
    rate = (1 + sum(survival)) / (1 + len(survival) * cost)
    longer = survival_of([*acceptances, acceptances[-1]])
    longer_rate = (1 + sum(longer)) / (1 + len(longer) * cost)
    if longer_rate != pytest.approx(rate, rel=1e-9):
        assert CostStop(cost).goes_on(survival) == (longer_rate > rate)


def test_the_cost_rule_stops_sooner_for_dearer_or_worse_pieces():
    def length(acceptance: float, cost: float) -> int:
        count = 1
        while count < 50 and CostStop(cost).goes_on(survival_of([acceptance] * count)):
            count += 1
        return count

    assert length(0.9, 0.1) > length(0.6, 0.1) > length(0.2, 0.1)
    assert length(0.9, 0.02) > length(0.9, 0.1) > length(0.9, 0.5)


def test_the_cost_rule_stops_where_all_hope_is_gone():
    assert not CostStop(0.1).goes_on((0.0,))
    assert not CostStop(0.1).goes_on((0.0, 0.0))


def test_equal_seeds_give_equal_heads_and_leave_the_global_randomness_alone():
    before = torch.random.get_rng_state()
    first, same, other = (AcceptanceHead(WIDTH, seed)(features(4)) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_new_head_is_hopeful():
    chances_B = AcceptanceHead(WIDTH, 0)(features(100)).sigmoid()
    assert chances_B.shape == (100,)
    assert chances_B.min() > 0.5


def test_features_are_the_state_the_probability_the_entropy_and_the_place():
    hidden_BW = torch.arange(2.0 * WIDTH).reshape(2, WIDTH)
    found = piece_features(hidden_BW, torch.tensor([0.5, 0.0]), torch.tensor([1.0, 2.0]), index=4)
    assert torch.equal(found[:, :WIDTH], hidden_BW)
    assert found[:, WIDTH:].tolist() == [[pytest.approx(-0.6931, abs=1e-4), 1.0, 0.5], [-10.0, 2.0, 0.5]]
    assert found.shape[1] == WIDTH + EXTRA_FEATURES


def test_a_saved_head_loads_again(tmp_path):
    head, other = AcceptanceHead(WIDTH, 0), AcceptanceHead(WIDTH, 1)
    save_head(head, tmp_path / "head.safetensors")
    load_head(other, tmp_path / "head.safetensors")
    assert torch.equal(head(features(3)), other(features(3)))


def test_a_head_of_another_width_is_refused(tmp_path):
    save_head(AcceptanceHead(WIDTH, 0), tmp_path / "head.safetensors")
    with pytest.raises(ModelError, match="must be the head of a drafter of this width"):
        load_head(AcceptanceHead(WIDTH + 1, 0), tmp_path / "head.safetensors")
