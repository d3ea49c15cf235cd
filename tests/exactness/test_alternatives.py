"""Alternatives of greedy drafts change neither the text's distribution nor what the acceptance head learns."""

from dataclasses import replace

import pytest
import torch
from enumeration import EXACT, VOCABULARIES, Distribution, World, add_up, difference, true_distribution
from whole_stages import new_row, stages_of

from stages.contract.blocks import Draft, Proposal, Verdict
from stages.decode import Decode
from stages.drafting.costs import Costs
from stages.drafting.head import AcceptanceHead
from stages.drafting.selection import Selection
from stages.drafting.stopping import FixedLength
from stages.learn.examples.builder import make_labels
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource, SeededRandomSource
from stages.translate import Translate
from stages.verify import Verify
from store.events import Outcome

SPELLINGS = {"direct": ((0,), (1,), (2,), (3,), None)} | VOCABULARIES
FREE = Costs(target=((1, 1.0), (60, 1.0)), drafter=((1, 0.1),))  # a pass over more tokens takes no longer


def selection_of(translate: Translate, costs: Costs, most: int = 3) -> Selection:
    """A selection of alternatives alone."""
    return Selection(costs, translate._trie, translate._parse, most, drops=False)


def greedy_stages(world: World, *, most: int = 3) -> tuple[Decode, Translate, Verify]:
    """The stages of a world whose drafter is greedy, with alternatives if `most` is not 0."""
    first, translate, verify = stages_of(world)
    head = AcceptanceHead(first.model.hidden_size, 0)
    decode = Decode(
        first.model, head, FixedLength(), SamplingParams(0.0), world.allowed, world.max_draft, None, torch.float64
    )
    decode.selection = translate.selection = selection_of(translate, FREE, most)
    return decode, translate, verify


def distribution_with_alternatives(world: World, count: int) -> tuple[Distribution, set[tuple[int, ...]]]:
    """The distribution of the first tokens, and the parents of the trees' candidates."""
    shapes: set[tuple[int, ...]] = set()

    def run(rng: RandomSource) -> tuple[int, ...]:
        stages, row = greedy_stages(world), new_row(rng, 4)
        decode, translate, verify = stages
        for stage in stages:
            stage.admit(row)
        while not row.finish and row.emitted < count:
            proposals = translate(decode([row]))
            shapes.update(one.draft.tree.parents for one in proposals if one.draft.tree)
            translate.observe(verify(proposals))
        return tuple(row.tokens[row.prompt_length :])[:count]

    return add_up(run), shapes


@pytest.mark.parametrize("mode", ["trie", "match"])
@pytest.mark.parametrize("vocabulary", SPELLINGS)
def test_the_text_has_the_targets_distribution(vocabulary: str, mode: str):
    shapes: set[tuple[int, ...]] = set()
    for seed in range(3):
        world = World(SPELLINGS[vocabulary], 4, mode=mode, max_draft=2, seed=seed, target_support=3)
        found, seen = distribution_with_alternatives(world, 2)
        shapes |= seen
        assert difference(found, true_distribution(world, 2)) < EXACT
    assert any(parents.count(-1) > 1 for parents in shapes), "some tokens had alternatives"


def block(world: World, *, most: int, seed: int) -> Verdict:
    decode, translate, verify = greedy_stages(world, most=most)
    verify._distribute._sampling = SamplingParams(0.0)
    row = new_row(SeededRandomSource(seed, 0), 9)
    for stage in (decode, translate, verify):
        stage.admit(row)
    (verdict,) = verify(translate(decode([row])))
    return verdict


@pytest.mark.parametrize("vocabulary", ["direct", "nested"])
def test_at_temperature_0_more_is_emitted_and_the_labels_are_those_of_the_chain(vocabulary: str):
    accepted = 0
    for seed in range(30):
        world = World(SPELLINGS[vocabulary], 4, max_draft=3, seed=seed)
        chain, tree = (block(world, most=most, seed=seed) for most in (0, 3))
        assert tree.emitted[: len(chain.emitted)] == chain.emitted
        accepted += sum(one.proposed is None and one.outcome is Outcome.ACCEPTED for one in tree.decisions)
        if tree.proposal.draft.tree:
            chances = [[one.acceptance for one in make_labels(verdict)] for verdict in (chain, tree)]
            assert chances[0] == chances[1]
    assert accepted > 2, "alternatives were accepted"


def proposal_of(world: World, **changes: object) -> tuple[Proposal, Translate]:
    decode, translate, _ = greedy_stages(world)
    row = new_row(SeededRandomSource(0, 0), 9)
    decode.admit(row)
    (draft,) = decode([row])
    return Proposal(replace(draft, **changes), translate([replace(draft, alternatives=())])[0].tokens), translate


def test_alternatives_are_verified_only_where_they_pay():
    world = World(SPELLINGS["direct"], 4, max_draft=3, seed=1)
    proposal, translate = proposal_of(world, survival=(0.9, 0.5, 0.1))
    (free,) = selection_of(translate, FREE).select([proposal])
    assert free.draft.tree is not None
    assert free.draft.tree.tokens[:3] == tuple(one.token for one in proposal.tokens)
    assert free.verifiable == free.draft.tree.tokens
    steep = selection_of(translate, Costs(target=((1, 1.0), (11, 11.0)), drafter=((1, 0.1),)))
    assert steep.select([proposal]) == [proposal]
    assert (selection_of(translate, FREE).wants_alternatives(4), steep.wants_alternatives(4)) == (True, False)
    assert not selection_of(translate, FREE, 0).wants_alternatives(4)


def test_a_draft_that_ends_in_no_token_stays_a_chain():
    world = World(SPELLINGS["gaps"], 4, max_draft=3, seed=0)
    proposal, translate = proposal_of(world)
    ended = replace(proposal, tokens=(*proposal.tokens[:-1], replace(proposal.tokens[-1], token=None)))
    assert selection_of(translate, FREE).select([ended]) == [ended]


def test_drawn_drafts_have_no_alternatives():
    world = World(SPELLINGS["direct"], 4, max_draft=3, seed=0)
    decode, translate, _ = stages_of(world)
    decode.selection = translate.selection = selection_of(translate, FREE)
    row = new_row(SeededRandomSource(0, 0), 9)
    decode.admit(row)
    drafts: list[Draft] = decode([row])
    assert drafts[0].alternatives == ()
    assert translate(drafts)[0].draft.tree is None
