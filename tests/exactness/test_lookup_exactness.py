"""Exactness with two drafters: whoever drafts a block, what is emitted has the target's law (design, section 4).

Every outcome of `DecodeOrLookup`, `Translate` and `Verify` is enumerated, at a temperature above 0, while the choice
between the drafters depends on what was emitted and judged before. Greedy is compared over the whole loop.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import whole_stages
from enumeration import Law, World, difference, every_outcome, true_law
from test_greedy_parity import completions, config_of, decisions, plain, prompts, run
from whole_stages import new_row, stages_of

from stages.blocks import Draft
from stages.costs import Costs
from stages.draws import Draws
from stages.lookup import DecodeOrLookup, LookupDraft, Payoff
from store.events import Drafter

EXACT = 1e-12
COSTS = Costs(((1, 1.0), (2, 1.05)), ((1, 0.45),))
__all__ = ["plain", "prompts"]  # fixtures

# Pieces 0..2 and 3; prompts are the same numbers in both vocabularies.
NESTED = ((0,), (1,), (0, 1), (0, 1, 2), (2,), None, (1, 3))
GAPS = ((0,), (1,), (0, 1, 2), (2, 3, 1), (2, 3), (0, 2), None)  # gaps at (0, 1) and at (2,)
SHARED = ((0,), (0, 1), (0, 1, 1), (1, 0), (1, 0, 1), (1,), None)
VOCABULARIES = {"nested": NESTED, "gaps": GAPS, "shared": SHARED}
REPEATS = {
    "nested": (0, 1, 2, 0, 1),  # an n-gram of three is copied, and of its beginning
    "gaps": (2, 3, 0, 1, 2, 3),
    "shared": (1, 0, 1, 1, 0, 1),
}


class Always(Payoff):
    """Copies whatever it can, up to a length that depends on the match."""

    def __init__(self, longest: int) -> None:
        super().__init__(COSTS)
        self._longest = longest

    def best(self, match: int, most: int) -> int:
        return min(most, 1 + match % self._longest)


class Learned(Payoff):
    """Learns so fast that one block turns the choice."""

    def __init__(self) -> None:
        super().__init__(COSTS)
        for ratio in self._copied:
            ratio.above, ratio.below, ratio.keep = 1.2, 2.0, 0.5


class Seen:
    """Who drafted in all outcomes, and how long the copies were."""

    def __init__(self) -> None:
        self.orders: set[tuple[bool, ...]] = set()
        self.lengths: set[int] = set()


def world_of(vocabulary: str, seed: int, **changed: Any) -> World:
    size = 2 if vocabulary == "shared" else 4
    world = World(
        VOCABULARIES[vocabulary], size, max_draft=2, seed=seed, target_support=3, drafter_support=2,
    )  # fmt: skip
    return replace(world, **changed)


def both_drafters(world: World, payoff: Payoff, most: int = 4) -> tuple[DecodeOrLookup, Any, Any]:
    decode, translate, verify = stages_of(world)
    wrapped = DecodeOrLookup(decode, payoff, world.allowed, world.drafter_size, most, torch.float64)
    return wrapped, translate, verify


def law_of(world: World, prompt: tuple[int, ...], payoff: Any, count: int, room: int, monkeypatch) -> tuple[Law, Seen]:
    """The law of the first `count` tokens behind a prompt that repeats itself."""
    monkeypatch.setattr(whole_stages, "PROMPT", prompt)
    seen = Seen()

    def emitted(draws: Draws) -> tuple[int, ...]:
        stages, row = both_drafters(world, payoff()), new_row(draws, room)
        decode, translate, verify = stages
        for stage in stages:
            stage.admit(row)
        order: list[bool] = []
        while not row.finish and row.emitted < count:
            drafts = decode([row])
            order.append(isinstance(drafts[0], LookupDraft))
            seen.lengths.update(len(draft.pieces) for draft in drafts if isinstance(draft, LookupDraft))
            verdicts = verify(translate(drafts))
            translate.observe(verdicts)
            decode.observe(verdicts)
        seen.orders.add(tuple(order))
        return tuple(row.tokens[row.prompt_length :])[:count]

    law: Law = defaultdict(float)
    for weight, tokens in every_outcome(emitted):
        law[tokens] += weight
    return law, seen


def assert_exact(law: Law, world: World, count: int) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=EXACT), "outcomes were left out"
    assert difference(law, true_law(world, count)) < EXACT


@pytest.mark.parametrize("mode", ["trie", "match"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_copies_of_all_lengths_keep_the_targets_law(vocabulary: str, mode: str, monkeypatch):
    for seed in range(3):
        world = world_of(vocabulary, seed, mode=mode)
        law, seen = law_of(world, REPEATS[vocabulary], lambda: Always(3), 2, 4, monkeypatch)
        assert_exact(law, world, 2)
        assert any(order[0] for order in seen.orders)
        assert max(seen.lengths) > 1


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_window_that_ends_inside_a_copy(room: int, monkeypatch):
    world = world_of("gaps", 4)
    law, seen = law_of(world, REPEATS["gaps"], lambda: Always(4), min(room, 2), room, monkeypatch)
    assert_exact(law, world, min(room, 2))
    assert max(seen.lengths) <= room


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_cache_that_fills_and_evicts_while_drafters_change(vocabulary: str, monkeypatch):
    world = world_of(vocabulary, 5, seeded=False, cache_entries=1)
    law, _ = law_of(world, REPEATS[vocabulary], lambda: Always(3), 3, 5, monkeypatch)
    assert_exact(law, world, 3)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_choice_that_follows_what_was_judged_before_keeps_the_targets_law(vocabulary: str, monkeypatch):
    orders: set[tuple[bool, ...]] = set()
    for seed in (1, 2, 3):
        world = world_of(vocabulary, seed)
        law, seen = law_of(world, REPEATS[vocabulary], Learned, 3, 5, monkeypatch)
        assert_exact(law, world, 3)
        orders |= seen.orders
    assert any(True in order and False in order for order in orders), "one text must have been drafted by both"


# The suite can fail.


def _copies_count_as_half_certain(monkeypatch):
    drafted = DecodeOrLookup._lookup_draft

    def half(self, row, pieces):
        draft = drafted(self, row, pieces)
        return replace(draft, laws_KD=0.5 * draft.laws_KD + 0.5 / self._drafter_size)

    monkeypatch.setattr(DecodeOrLookup, "_lookup_draft", half)


def _the_copy_is_made_where_the_model_drew_something_else(monkeypatch):
    """A choice that looks at the present draft."""

    def looking(self, batch):
        drafts: list[Draft] = []
        for row, draft in zip(batch, self._decode(batch), strict=True):
            copied = self._chosen(row)
            drafts.append(self._lookup_draft(row, copied) if copied and copied[0] != draft.pieces[0] else draft)
        return drafts

    monkeypatch.setattr(DecodeOrLookup, "__call__", looking)


@pytest.mark.parametrize(
    "mutate", [_copies_count_as_half_certain, _the_copy_is_made_where_the_model_drew_something_else]
)
def test_a_wrong_law_or_a_choice_that_looks_ahead_is_found_out(mutate, monkeypatch):
    mutate(monkeypatch)
    worst = 0.0
    for vocabulary in ("nested", "shared"):
        world = world_of(vocabulary, 2)
        law, _ = law_of(world, REPEATS[vocabulary], lambda: Always(3), 2, 4, monkeypatch)
        worst = max(worst, difference(law, true_law(world, 2)))
    assert worst > 1e-3


# Real models.


@pytest.mark.parametrize("changes", [{"batch": 1}, {"batch": 8, "learn__interval": 10}])
def test_greedy_is_plain_decoding_with_lookups(changes: dict[str, Any], prompts, plain, tmp_path):
    chosen = prompts[::5]
    config = config_of(draft__lookup=True, draft__relative_cost=0.3, **changes)  # costs that no machine changes
    events, _ = run(config, chosen, tmp_path)
    assert completions(events) == {prompt.offset: plain[prompt.offset] for prompt in chosen}
    copied = [event for event in decisions(events) if event.drafter is Drafter.LOOKUP and event.drafter_levels]
    assert sum(event.outcome == "accepted" for event in copied) > len(chosen), "lookups must have mattered"
    assert {level for event in copied for level in event.drafter_levels} == {1.0}
    assert any(event.drafter is Drafter.MODEL and event.outcome == "accepted" for event in decisions(events))
