"""Exactness with penalties, biases and min-p: a row has the distribution of plain decoding.

Every outcome of one row is enumerated through whole production stages, in double precision, over drafts of the model
and over trees. The expected distribution applies the transforms token by token.
"""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from enumeration import EXACT, VOCABULARIES, Distribution, World, difference, true_distribution
from plain_controls import control
from test_mixed_rows import world_of
from test_sampling import reference
from test_tree_exactness import KINDS, given_trees
from torch import Tensor
from whole_stages import PROMPT, batch_distribution, new_row, stages_of

from stages.contract.blocks import SequenceState
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource

PENALISED = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4)
REPEATED = SamplingParams(repetition_penalty=1.6, logit_bias=((0, 1.5), (4, -0.75)))
EVERYTHING = SamplingParams(
    presence_penalty=-0.5, frequency_penalty=0.9, repetition_penalty=0.6, logit_bias=((1, 0.8), (2, -1.0))
)
PLAIN, WARM, CUT = SamplingParams(), SamplingParams(1.0), SamplingParams(0.8, 0, 0.85, min_p=0.2)


@dataclass(frozen=True)
class ControlledWorld(World):
    """A world whose target's distribution is transformed by a request's controls and sampling, token by token."""

    controls: SamplingParams = PLAIN
    sampling: SamplingParams = WARM

    def target_distribution(self, emitted: tuple[int, ...]) -> Tensor:
        logits = control(super().target_distribution(emitted).log().tolist(), PROMPT, emitted, self.controls)
        own = self.sampling
        return torch.tensor(reference(logits, own.temperature, own.top_k, own.top_p, own.min_p), dtype=torch.float64)


def wanted_distribution(
    world: World, count: int, controls: SamplingParams, sampling: SamplingParams = WARM
) -> Distribution:
    return true_distribution(ControlledWorld(**vars(world), controls=controls, sampling=sampling), count)


def new_controlled_row(
    rng: RandomSource, remaining_tokens: int, offset: int, controls: SamplingParams, sampling: SamplingParams
) -> SequenceState:
    own = replace(sampling, ignore_eos=controls.ignore_eos, stop_token_ids=controls.stop_token_ids)
    row = new_row(rng, remaining_tokens, offset, own)
    row.transforms = controls.make_transforms(row.tokens)
    return row


def assert_exact(distribution: Distribution, wanted: Distribution) -> None:
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT), "outcomes were left out"
    assert difference(distribution, wanted) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [WARM, CUT, SamplingParams(0.0)], ids=["warm", "cut", "greedy"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_drafts_of_the_model_keep_the_transformed_distribution(vocabulary: str, sampling: SamplingParams):
    world = world_of(vocabulary, 3)
    distribution = batch_distribution(lambda: stages_of(world), [(EVERYTHING, sampling)], 0, 2, new_controlled_row)
    assert_exact(distribution, wanted_distribution(world, 2, EVERYTHING, sampling))


@pytest.mark.sweep
def test_three_tokens_of_which_two_may_be_equal():
    world = world_of("nested", 3, target_support=2)
    wanted = wanted_distribution(world, 3, PENALISED)
    assert difference(wanted, true_distribution(world, 3)) > 1e-2, "the transforms must matter"
    assert any(len(set(tokens)) < 3 for tokens in wanted)
    assert_exact(batch_distribution(lambda: stages_of(world), [(PENALISED, WARM)], 0, 3, new_controlled_row), wanted)


@pytest.mark.parametrize("sampling", [WARM, CUT, SamplingParams(0.0)], ids=["warm", "cut", "greedy"])
def test_trees_keep_the_transformed_distribution(sampling: SamplingParams):
    for kind, seed in (("some", 4), ("all mass", 5), ("impossible first", 6)):
        world = world_of("nested", seed)
        make = partial(given_trees, world, KINDS[kind])
        distribution = batch_distribution(make, [(EVERYTHING, sampling)], 0, 3, new_controlled_row)
        assert_exact(distribution, wanted_distribution(world, 3, EVERYTHING, sampling))


MIXED = [(EVERYTHING, CUT), (PLAIN, WARM), (REPEATED, WARM)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MIXED)))
@pytest.mark.parametrize("trees", [False, True])
def test_each_row_of_a_batch_has_its_own_transforms(number: int, trees: bool):
    world = world_of("gaps", 5)
    make = partial(given_trees, world, KINDS["some"]) if trees else partial(stages_of, world)
    distribution = batch_distribution(make, MIXED, number, 2, new_controlled_row)
    assert_exact(distribution, wanted_distribution(world, 2, *MIXED[number]))


@pytest.mark.slow
@pytest.mark.parametrize("trees", [False, True])
def test_ends_of_sequence_that_are_ignored_and_further_ones(trees: bool):
    world = world_of("nested", 4)
    ends = world.target_distribution(()).argsort(descending=True).tolist()[:2]
    world = replace(world, ends=(ends[0],))
    for controls, wanted_ends in [
        (SamplingParams(ignore_eos=True), ()),
        (SamplingParams(stop_token_ids=(ends[1],)), ends),
        (replace(PENALISED, ignore_eos=True, stop_token_ids=(ends[1],)), (ends[1],)),
    ]:
        make = partial(given_trees, world, KINDS["all mass"]) if trees else partial(stages_of, world)
        distribution = batch_distribution(make, [(controls, WARM)], 0, 2, new_controlled_row)
        wanted = wanted_distribution(replace(world, ends=tuple(wanted_ends)), 2, controls)
        assert_exact(distribution, wanted)
        assert bool(wanted_ends) == any(len(tokens) < 2 for tokens in wanted)
