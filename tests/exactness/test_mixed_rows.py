"""Exactness of batches with mixed sampling: each row has the target's distribution under its own transform.

Every outcome of one row is enumerated through whole production stages, in double precision, while the others, which
sample otherwise, draw fixed numbers and leave early.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from doubles import row_of
from enumeration import EXACT, VOCABULARIES, Distribution, World, add_up, difference, true_distribution
from test_sampling import reference
from torch import Tensor
from whole_stages import PROMPT, admit, advance, batch_distribution, emit, new_row, stages_of

from stages.prompts.prompt_reader import PromptReader
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSource
from stages.vocabulary.text_stream import StopStrings

GREEDY, WARM, NUCLEUS = SamplingParams(0.0), SamplingParams(1.0), SamplingParams(0.7, 0, 0.8)
MIXED = (GREEDY, WARM, NUCLEUS)


@dataclass(frozen=True)
class TransformedWorld(World):
    """A world whose target's distribution is transformed by a row's sampling, token by token."""

    sampling: SamplingParams = WARM

    def target_distribution(self, emitted: tuple[int, ...]) -> Tensor:
        own = self.sampling
        logits = super().target_distribution(emitted).log().tolist()
        return torch.tensor(reference(logits, own.temperature, own.top_k, own.top_p), dtype=torch.float64)


def world_of(vocabulary: str, seed: int, **changed: Any) -> World:
    settings = {"max_draft": 2, "target_support": 3, "drafter_support": 2} | changed
    return World(VOCABULARIES[vocabulary], 4, seed=seed, **settings)


def wanted_distribution(world: World, count: int, sampling: SamplingParams) -> Distribution:
    return true_distribution(TransformedWorld(**vars(world), sampling=sampling), count)


def worst(world: World) -> float:
    """Largest difference of a probability over all rows of the mixed batch."""
    wanted = [wanted_distribution(world, 2, sampling) for sampling in MIXED]
    return max(
        difference(batch_distribution(lambda: stages_of(world), [(one,) for one in MIXED], number, 2), distribution)
        for number, distribution in enumerate(wanted)
    )


@pytest.mark.representatives(2)
@pytest.mark.parametrize("mode", ["trie", "match", "tli"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_row_has_the_distribution_that_it_requested(vocabulary: str, mode: str):
    assert worst(world_of(vocabulary, 3, mode=mode)) < EXACT


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("seed", range(4))
def test_every_row_has_the_distribution_that_it_requested_while_drafts_stop_and_the_cache_changes(seed: int):
    assert worst(world_of("gaps", seed, seeded=False, cache_entries=1, adaptive=True)) < EXACT


def test_the_distributions_that_are_requested_differ():
    distributions = [wanted_distribution(world_of("nested", 3), 2, sampling) for sampling in MIXED]
    assert [len(distribution) > 1 for distribution in distributions] == [False, True, True]
    assert difference(distributions[1], distributions[2]) > 0.05


def test_rows_of_one_batch_are_independent():
    """Their joint distribution is the product of their distributions: no draw of one row changes another row."""
    world = world_of("nested", 3, max_draft=1)

    def run(rng: RandomSource) -> tuple[int, ...]:
        rows = [new_row(rng, 1, n, sampling) for n, sampling in enumerate(MIXED)]
        stages = stages_of(world)
        admit(stages, rows)
        advance(stages, list(rows))
        return tuple(row.tokens[-1] for row in rows)

    joint = add_up(run)
    distributions = [wanted_distribution(world, 1, sampling) for sampling in MIXED]
    assert len(joint) > 4
    for tokens in joint:
        assert joint[tokens] == pytest.approx(
            prod(distribution[(token,)] for distribution, token in zip(distributions, tokens, strict=True)), abs=EXACT
        )


def test_a_row_next_to_a_prompt_that_is_read_has_the_targets_distribution():
    """A row whose prompt is still read in the same passes, part by part, draws nothing and emits nothing."""
    world = world_of("nested", 3)

    def run(rng: RandomSource) -> tuple[int, ...]:
        reading, row = row_of(PROMPT * 30, PROMPT, offset=1), new_row(rng, 3)
        decode, translate, judge = stages_of(world)
        judge.reader = PromptReader(judge.model, 5, None, live=True)
        for stage in (decode, translate, judge):
            stage.admit(reading)
            stage.admit(row)
        while row.emitted < 2:
            before = judge.model.length(reading)
            empty, verdict = judge(translate(decode([reading, row])))
            assert (empty.emitted, judge.model.length(reading)) == ((), before + 5)
            assert verdict.proposal.draft.row is row
        assert reading.reading
        return tuple(row.tokens[row.prompt_length :])[:2]

    distribution = add_up(run)
    assert difference(distribution, true_distribution(world, 2)) < EXACT


# Stop strings: tokens are the letters a, b, c, ...


def text_of(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


def stop_at(distribution: Distribution, stops: Sequence[str]) -> Distribution:
    """Cut every sequence after the token that completes a stop string."""
    found: Distribution = defaultdict(float)
    for tokens, weight in distribution.items():
        ends = (n for n in range(1, len(tokens)) if any(stop in text_of(tokens[:n]) for stop in stops))
        found[tokens[: next(ends, len(tokens))]] += weight
    return found


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("sampling", [WARM, NUCLEUS])
def test_a_row_that_ends_at_a_stop_string_has_the_targets_distribution_until_there(
    vocabulary: str, sampling: SamplingParams
):
    world = world_of(vocabulary, 6)
    plain = wanted_distribution(world, 3, sampling)
    first, second, _ = max(plain, key=plain.get)
    stops = [text_of((first, second)), text_of([min(tokens[0] for tokens in plain if tokens[0] != first)])]

    def run(rng: RandomSource) -> tuple[int, ...]:
        row = new_row(rng, 3, 0, sampling)
        row.stop_strings = StopStrings(lambda token: text_of([token]).encode(), stops)
        emitted = emit(stages_of(world), [row], row, 3)
        assert (row.finish == "stop") == any(stop in text_of(emitted) for stop in stops)
        return emitted

    distribution = add_up(run)
    assert difference(distribution, stop_at(plain, stops)) < EXACT
    assert {len(tokens) for tokens in distribution} == {1, 2, 3}
