"""Exactness with penalties, biases and min-p: a row has the distribution of plain decoding.

Every outcome of one row is enumerated through whole production stages, in double precision, over drafts of the model
and over trees. The expected distribution applies the transforms token by token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from enumeration import Distribution, World, add_up, difference, true_distribution
from plain_controls import control
from test_mixed_rows import VOCABULARIES, world_of
from test_sampling import reference
from test_tree_exactness import KINDS, admit, given_trees
from torch import Tensor
from whole_stages import PROMPT, Stages, advance, new_row, stages_of

from stages import verify
from stages.contract.blocks import SequenceState
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource, SeededRandomSource

EXACT = 1e-12
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


RowSettings = Sequence[tuple[SamplingParams, SamplingParams]]


def row_distribution(make: Callable[[], Stages], settings: RowSettings, number: int, count: int) -> Distribution:
    """The distribution of the first tokens of one row of a batch; the others draw fixed numbers and leave early."""

    def run(rng: RandomSource) -> tuple[int, ...]:
        rows = [
            new_controlled_row(rng, 4, n, *own)
            if n == number
            else new_controlled_row(SeededRandomSource(5, n), 1 + n, n, *own)
            for n, own in enumerate(settings)
        ]
        row, stages = rows[number], make()
        admit(stages, rows)
        while not row.finish and row.emitted < count:
            advance(stages, rows)
        return tuple(row.tokens[row.prompt_length :])[:count]

    return add_up(run)


def assert_exact(distribution: Distribution, wanted: Distribution) -> None:
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT), "outcomes were left out"
    assert difference(distribution, wanted) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [WARM, CUT, SamplingParams(0.0)], ids=["warm", "cut", "greedy"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_drafts_of_the_model_keep_the_transformed_distribution(vocabulary: str, sampling: SamplingParams):
    world = world_of(vocabulary, 3)
    distribution = row_distribution(lambda: stages_of(world), [(EVERYTHING, sampling)], 0, 2)
    assert_exact(distribution, wanted_distribution(world, 2, EVERYTHING, sampling))


@pytest.mark.sweep
def test_three_tokens_of_which_two_may_be_equal():
    world = world_of("nested", 3, target_support=2)
    wanted = wanted_distribution(world, 3, PENALISED)
    assert difference(wanted, true_distribution(world, 3)) > 1e-2, "the transforms must matter"
    assert any(len(set(tokens)) < 3 for tokens in wanted)
    assert_exact(row_distribution(lambda: stages_of(world), [(PENALISED, WARM)], 0, 3), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [WARM, CUT, SamplingParams(0.0)], ids=["warm", "cut", "greedy"])
def test_trees_keep_the_transformed_distribution(sampling: SamplingParams):
    for kind, seed in (("some", 4), ("all mass", 5), ("impossible first", 6)):
        world = world_of("nested", seed)
        distribution = row_distribution(lambda: given_trees(world, KINDS[kind]), [(EVERYTHING, sampling)], 0, 3)  # noqa: B023
        assert_exact(distribution, wanted_distribution(world, 3, EVERYTHING, sampling))


MIXED = [(EVERYTHING, CUT), (PLAIN, WARM), (REPEATED, WARM)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MIXED)))
@pytest.mark.parametrize("trees", [False, True])
def test_each_row_of_a_batch_has_its_own_transforms(number: int, trees: bool):
    world = world_of("gaps", 5)
    distribution = row_distribution(
        lambda: given_trees(world, KINDS["some"]) if trees else stages_of(world), MIXED, number, 2
    )
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
        distribution = row_distribution(
            lambda: given_trees(world, KINDS["all mass"]) if trees else stages_of(world), [(controls, WARM)], 0, 2
        )
        wanted = wanted_distribution(replace(world, ends=tuple(wanted_ends)), 2, controls)
        assert_exact(distribution, wanted)
        assert bool(wanted_ends) == any(len(tokens) < 2 for tokens in wanted)


def _history_without_the_draft(proposal):
    return [()] * (len(proposal.verifiable) + 1)


def _history_in_the_order_of_the_tree(proposal):
    return [proposal.verifiable[:length] for length in range(len(proposal.verifiable) + 1)]


@pytest.mark.parametrize(
    ("mutate", "trees"),
    [
        (_history_without_the_draft, False),
        (_history_without_the_draft, True),
        (_history_in_the_order_of_the_tree, True),
    ],
)
def test_another_history_is_detected(monkeypatch, mutate, trees):
    monkeypatch.setattr(verify, "proposed_prefixes", mutate)
    world = world_of("nested", 4)
    distribution = row_distribution(
        lambda: given_trees(world, KINDS["all mass"]) if trees else stages_of(world), [(EVERYTHING, WARM)], 0, 2
    )
    assert difference(distribution, wanted_distribution(world, 2, EVERYTHING)) > 1e-3
