"""Exactness with two drafters: for either source of a draft, emitted text has the target's distribution (design,
section 4).

Every outcome of `DecodeOrLookup`, `Translate` and `Verify` is enumerated, at a temperature above 0, while the choice
between the drafters depends on what was emitted and judged before. Greedy is compared over the whole loop.
"""

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import whole_stages
from enumeration import Distribution, World, difference, every_outcome, true_distribution
from test_greedy_parity import completions, config_of, decisions, plain, prompts, run
from whole_stages import new_row, stages_of

from stages.drafting.costs import Costs
from stages.drafting.prompt_lookup import PromptLookup
from stages.drafting.sources import Copy, DraftSourceSelector
from stages.lookup import DecodeOrLookup
from stages.sampling.random_source import RandomSource
from store.events import DraftSource

if TYPE_CHECKING:
    from stages.contract.blocks import Draft

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


class Always(DraftSourceSelector):
    """Copies whatever it can, up to a length that depends on the match."""

    def __init__(self, longest: int) -> None:
        super().__init__(COSTS)
        self._longest = longest

    def choose_length(self, match: int, most: int) -> Copy:
        return Copy(min(most, 1 + match % self._longest), 2.0)


class Learned(DraftSourceSelector):
    """Learns so fast that one block turns the choice."""

    def __init__(self) -> None:
        super().__init__(COSTS)
        for ratio in self._copied:
            ratio.numerator, ratio.denominator, ratio.decay = 1.2, 2.0, 0.5


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


def both_drafters(world: World, selector: DraftSourceSelector, most: int = 4) -> tuple[DecodeOrLookup, Any, Any]:
    decode, translate, verify = stages_of(world)
    return DecodeOrLookup(decode, [PromptLookup(selector, world.allowed, most)]), translate, verify


def distribution_of(
    world: World, prompt: tuple[int, ...], selector: Any, count: int, remaining_tokens: int, monkeypatch
) -> tuple[Distribution, Seen]:
    """The distribution of the first `count` tokens after a prompt that repeats itself."""
    monkeypatch.setattr(whole_stages, "PROMPT", prompt)
    seen = Seen()

    def run(rng: RandomSource) -> tuple[int, ...]:
        stages, row = both_drafters(world, selector()), new_row(rng, remaining_tokens)
        decode, translate, verify = stages
        for stage in stages:
            stage.admit(row)
        order: list[bool] = []
        while not row.finish and row.emitted < count:
            drafts = decode([row])
            order.append(drafts[0].source is DraftSource.LOOKUP)
            seen.lengths.update(len(draft.pieces) for draft in drafts if draft.source is DraftSource.LOOKUP)
            verdicts = verify(translate(drafts))
            translate.observe(verdicts)
            decode.observe(verdicts)
        seen.orders.add(tuple(order))
        return tuple(row.tokens[row.prompt_length :])[:count]

    distribution: Distribution = defaultdict(float)
    for weight, tokens in every_outcome(run):
        distribution[tokens] += weight
    return distribution, seen


def assert_exact(distribution: Distribution, world: World, count: int) -> None:
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT), "outcomes were left out"
    assert difference(distribution, true_distribution(world, count)) < EXACT


@pytest.mark.parametrize("mode", ["trie", "match"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_copies_of_all_lengths_keep_the_targets_distribution(vocabulary: str, mode: str, monkeypatch):
    for seed in range(3):
        world = world_of(vocabulary, seed, mode=mode)
        distribution, seen = distribution_of(world, REPEATS[vocabulary], lambda: Always(3), 2, 4, monkeypatch)
        assert_exact(distribution, world, 2)
        assert any(order[0] for order in seen.orders)
        assert max(seen.lengths) > 1


@pytest.mark.parametrize("remaining_tokens", [1, 2, 3])
def test_a_window_that_ends_inside_a_copy(remaining_tokens: int, monkeypatch):
    world = world_of("gaps", 4)
    distribution, seen = distribution_of(
        world, REPEATS["gaps"], lambda: Always(4), min(remaining_tokens, 2), remaining_tokens, monkeypatch
    )
    assert_exact(distribution, world, min(remaining_tokens, 2))
    assert max(seen.lengths) <= remaining_tokens


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_cache_that_fills_and_evicts_while_drafters_change(vocabulary: str, monkeypatch):
    world = world_of(vocabulary, 5, seeded=False, cache_entries=1)
    distribution, _ = distribution_of(world, REPEATS[vocabulary], lambda: Always(3), 3, 5, monkeypatch)
    assert_exact(distribution, world, 3)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_choice_that_follows_what_was_judged_before_keeps_the_targets_distribution(vocabulary: str, monkeypatch):
    orders: set[tuple[bool, ...]] = set()
    for seed in (1, 2, 3):
        world = world_of(vocabulary, seed)
        distribution, seen = distribution_of(world, REPEATS[vocabulary], Learned, 3, 5, monkeypatch)
        assert_exact(distribution, world, 3)
        orders |= seen.orders
    assert any(True in order and False in order for order in orders), "one text must have been drafted by both"


# The suite can fail.


def _copies_count_as_half_certain(monkeypatch):
    drafted = DecodeOrLookup._make_copied_draft

    def half(self, row, source, pieces):
        draft = drafted(self, row, source, pieces)
        return replace(draft, draft_probs_KD=0.5 * draft.draft_probs_KD + 0.5 / draft.draft_probs_KD.shape[1])

    monkeypatch.setattr(DecodeOrLookup, "_make_copied_draft", half)


def _the_copy_is_made_where_the_model_drew_something_else(monkeypatch):
    """A choice that looks at the present draft."""

    def looking(self, batch):
        drafts: list[Draft] = []
        for row, draft in zip(batch, self._decode(batch), strict=True):
            copied = self._choose_source(row)
            differs = copied and copied[1][0] != draft.pieces[0]
            drafts.append(self._make_copied_draft(row, *copied) if differs else draft)
        return drafts

    monkeypatch.setattr(DecodeOrLookup, "__call__", looking)


@pytest.mark.parametrize(
    "mutate", [_copies_count_as_half_certain, _the_copy_is_made_where_the_model_drew_something_else]
)
def test_a_wrong_distribution_or_a_choice_that_looks_ahead_is_found_out(mutate, monkeypatch):
    mutate(monkeypatch)
    worst = 0.0
    for vocabulary in ("nested", "shared"):
        world = world_of(vocabulary, 2)
        distribution, _ = distribution_of(world, REPEATS[vocabulary], lambda: Always(3), 2, 4, monkeypatch)
        worst = max(worst, difference(distribution, true_distribution(world, 2)))
    assert worst > 1e-3


# Real models.


@pytest.mark.parametrize("changes", [{"batch": 1}, {"batch": 8, "learn__interval": 10}])
def test_greedy_is_plain_decoding_with_lookups(changes: dict[str, Any], prompts, plain, tmp_path):
    chosen = prompts[::5]
    config = config_of(draft__lookup=True, draft__relative_cost=0.3, **changes)  # costs that no machine changes
    events, _ = run(config, chosen, tmp_path)
    assert completions(events) == {prompt.offset: plain[prompt.offset] for prompt in chosen}
    copied = [event for event in decisions(events) if event.drafter is DraftSource.LOOKUP and event.drafter_levels]
    assert sum(event.outcome == "accepted" for event in copied) > len(chosen), "lookups must have mattered"
    assert {level for event in copied for level in event.drafter_levels} == {1.0}
    assert any(event.drafter is DraftSource.MODEL and event.outcome == "accepted" for event in decisions(events))
