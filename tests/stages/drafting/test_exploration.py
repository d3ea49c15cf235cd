"""Exploration: which actions are drawn, with which chances, and that the weights have no bias."""

from collections import Counter

import pytest

from stages.drafting.sources import Exploration
from store.events import Action

ACTIONS = tuple(Action)
BLOCKS = 20_000


def test_a_draw_depends_on_seed_prompt_and_block_alone():
    one, other = Exploration(0.5, 1, ACTIONS), Exploration(0.5, 2, ACTIONS)
    places = [(offset, block) for offset in range(20) for block in range(20)]
    drawn = [one.choose(*place, Action.COPIES).drawn for place in places]
    assert drawn == [one.choose(*place, Action.MODEL).drawn for place in reversed(places)][::-1]
    assert drawn != [other.choose(*place, Action.COPIES).drawn for place in places]


def test_actions_are_drawn_alike_and_as_often_as_set():
    choices = [Exploration(0.3, 7, ACTIONS).choose(0, block, Action.COPIES) for block in range(BLOCKS)]
    drawn = Counter(choice.action for choice in choices if choice.drawn)
    assert drawn.total() == pytest.approx(0.3 * BLOCKS, rel=0.05)
    assert all(count == pytest.approx(0.1 * BLOCKS, rel=0.08) for count in drawn.values())
    assert sorted({round(choice.propensity, 12) for choice in choices}) == [0.1, 0.8]


def test_weighted_blocks_value_an_action_that_is_preferred_where_it_is_worth_most():
    """The model is worth 3 in every second block and 1 in the others, and is preferred in the former: 2 on average."""
    exploration, worth, weights = Exploration(0.2, 5, ACTIONS), 0.0, 0.0
    for block in range(BLOCKS):
        good = block % 2 == 0
        choice = exploration.choose(9, block, Action.MODEL if good else Action.COPIES)
        if choice.action is Action.MODEL:
            worth += (3 if good else 1) / choice.propensity
            weights += 1 / choice.propensity
    assert weights == pytest.approx(BLOCKS, rel=0.05)
    assert worth / weights == pytest.approx(2.0, rel=0.05)
