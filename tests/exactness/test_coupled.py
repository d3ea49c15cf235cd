"""Coupled sampling: with noise, the text is the one of plain decoding, whatever is drafted, and has its law."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import log

import numpy as np
import pytest
from enumeration import NESTED, VOCABULARIES, World, true_distribution
from scipy.stats import chi2, chi2_contingency
from test_alternatives import FREE, selection_of
from token_trees import GivenTrees, make_tree
from torch import Tensor
from whole_stages import Stages, new_row, stages_of

from stages.sampling.noise import Arrival, Noise
from stages.sampling.random_source import SeededRandomSource
from stages.sampling.transforms import LogitTransform, Penalties

PLACES = 3
SMALL = ((0,), (1,), (0, 1), (1, 0, 0))  # as many tokens as a grid of noise can have
WORLDS = {
    "small": World(SMALL, 2, max_draft=3, seed=4),
    "small-cached": World(SMALL, 2, max_draft=3, seed=5, seeded=False, cache_entries=1),
    "small-adaptive": World(SMALL, 2, max_draft=3, seed=6, adaptive=True, drafter_support=1),
}


@dataclass(frozen=True)
class GridNoise(Noise):
    """Given numbers by place and token; of names that are no token, and further places, the middle."""

    key: int = 0
    numbers: Sequence[Sequence[float]] = field(default=())

    def number(self, place: int, token: int) -> float:
        known = place < len(self.numbers) and token < len(self.numbers[place])
        return self.numbers[place][token] if known else 0.5

    def race(self, weights_V: Tensor, place: int, most: int = 1, names_V: Sequence[int] = ()) -> list[Arrival]:
        names = names_V if len(names_V) else range(len(weights_V))
        arrivals = [
            Arrival(index, -log(self.number(place, name)) / weight)
            for index, (name, weight) in enumerate(zip(names, weights_V.tolist(), strict=True))
            if weight > 0
        ]
        return sorted(arrivals, key=lambda one: one.time)[:most]


def every_noise(values: Sequence[float], tokens: int) -> list[GridNoise]:
    """All noises of a grid. No two tokens of a place are equally early: a tie would be decided by rounding."""
    ties = np.linspace(0, 0.05, tokens)
    return [
        GridNoise(numbers=[[value + own for value, own in zip(line, ties, strict=True)] for line in lines])
        for lines in product(product(values, repeat=tokens), repeat=PLACES)
    ]


def plain_text(world: World, noise: Noise) -> tuple[int, ...]:
    """The first tokens of plain decoding: at each place the one that is first, given the target's distribution."""
    text: tuple[int, ...] = ()
    while len(text) < PLACES:
        weights = world.target_distribution(text).tolist()
        times = [-log(noise.number(len(text), t)) / weight if weight else np.inf for t, weight in enumerate(weights)]
        text += (int(np.argmin(times)),)
    return text


def chains(world: World) -> Stages:
    return stages_of(world)


def trees_of_the_model(world: World) -> Stages:
    decode, translate, verify = stages_of(world)
    decode.selection = translate.selection = selection_of(translate, FREE)
    return decode, translate, verify


def given_trees(world: World) -> Stages:
    """Every token with every token after it, where the text has an even number of tokens; else the model's draft."""
    decode, translate, verify = stages_of(world)
    every = range(len(world.spelling))
    tree = make_tree({token: {after: {} for after in every} for token in every})
    return GivenTrees(decode, lambda row: None if row.emitted % 2 else tree), translate, verify


def drafted_text(
    stages: Stages, noise: Noise, transforms: tuple[LogitTransform, ...] = ()
) -> tuple[tuple[int, ...], int]:
    """The first tokens that whole stages emit, and how many drafted ones were accepted. Their cache may have changed
    with every text before.
    """
    decode, translate, verify = stages
    row = new_row(SeededRandomSource(0, 0), PLACES)
    row.noise, row.transforms = noise, transforms
    for stage in stages:
        stage.admit(row)
    accepted = 0
    while not row.finish:
        (verdict,) = verify(translate(decode([row])))
        translate.observe([verdict])
        accepted += verdict.accepted
    for stage in stages:
        stage.release(row)
    return tuple(row.tokens[row.prompt_length :]), accepted


@pytest.mark.parametrize("stages", [chains, trees_of_the_model, given_trees])
@pytest.mark.parametrize("name", WORLDS)
def test_the_text_is_that_of_plain_decoding_for_the_noises_of_a_grid(name: str, stages):
    world, accepted, made = WORLDS[name], 0, stages(WORLDS[name])
    for noise in every_noise((0.1, 0.8), len(SMALL))[::100]:
        text, drafted = drafted_text(made, noise)
        assert text == plain_text(world, noise)
        accepted += drafted
    assert accepted > 10, "drafts must have been accepted"


@pytest.mark.sweep
@pytest.mark.parametrize("stages", [chains, trees_of_the_model, given_trees])
def test_the_text_is_that_of_plain_decoding_for_every_noise_of_a_grid(stages):
    made = stages(WORLDS["small"])
    for noise in every_noise((0.1, 0.8), len(SMALL)):
        assert drafted_text(made, noise)[0] == plain_text(WORLDS["small"], noise)


@pytest.mark.parametrize("stages", [chains, trees_of_the_model, given_trees])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_text_is_that_of_plain_decoding_for_the_noise_of_seeds(vocabulary: str, stages):
    world = World(VOCABULARIES[vocabulary], 4, max_draft=3, seed=7)
    made = stages(world)
    for seed in range(30):
        noise = Noise.from_seed(seed, 5)
        assert drafted_text(made, noise)[0] == plain_text(world, noise)


@pytest.mark.parametrize("half", [250, pytest.param(4000, marks=pytest.mark.sweep)])
def test_the_text_has_the_targets_law(half: int):
    """Chi-square of three tokens, texts of few expected counts together; seeds of different drafts do not overlap."""
    world = World(NESTED, 4, max_draft=3, seed=8, target_support=3)
    wanted = true_distribution(world, PLACES)
    found = [
        Counter(drafted_text(made, Noise.from_seed(seed, 0))[0] for seed in range(begin, begin + half))
        for made, begin in ((chains(world), 0), (trees_of_the_model(world), half))
    ]
    frequent = [text for text, chance in wanted.items() if chance * half >= 5]
    chances = [*(wanted[text] for text in frequent), sum(wanted[text] for text in wanted.keys() - set(frequent))]
    lines = [[*(one[text] for text in frequent), half - sum(one[text] for text in frequent)] for one in found]
    for line in lines:
        statistic = sum(
            (count - half * chance) ** 2 / (half * chance) for count, chance in zip(line, chances, strict=True)
        )
        assert chi2.sf(statistic, len(chances) - 1) > 1e-3
    assert chi2_contingency(np.array(lines)).pvalue > 1e-3


def test_a_drafter_that_is_the_target_is_always_right():
    """Its distribution is the target's pushed to pieces, so the same numbers lead to the same tokens."""
    world = World(((0,), (1,), (2,)), 3, max_draft=3, seed=9)
    decode, translate, verify = stages_of(world)
    decode.model = verify.model.__class__(lambda pieces: world.target_distribution(tuple(pieces[2:])).log(), 3)
    decode.model.restrict(range(3))
    for seed in range(40):
        assert drafted_text((decode, translate, verify), Noise.from_seed(seed, 0))[1] == PLACES


def test_penalties_belong_to_the_distribution_that_races():
    world, penalties = World(NESTED, 4, max_draft=3, seed=7), (Penalties([0], 1.5, 0.5, 1.2),)
    plain, *drafted = (
        chains(replace(world, max_draft=0)),
        chains(world),
        trees_of_the_model(world),
        given_trees(world),
    )
    changed = 0
    for seed in range(30):
        noise = Noise.from_seed(seed, 1)
        text, _ = drafted_text(plain, noise, penalties)
        assert [drafted_text(stages, noise, penalties)[0] for stages in drafted] == [text] * len(drafted)
        changed += text != plain_text(world, noise)
    assert changed > 2, "penalties must have changed some texts"
