"""The sampling transform against references that work token by token, and drawing by inversion."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from enumeration import EnumeratingRandomSource
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from stages.sampling import distributions
from stages.sampling.distributions import entropy, to_distribution, to_probs
from stages.sampling.drawing import sample, sample_rows
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import UNIFORM_BITS, SeededRandomSource, to_float32_grid
from store.errors import ConfigError

# Sixteenths: sums and comparisons are exact, so that a reference cannot differ by rounding at a threshold.
logits_lists = st.lists(st.integers(-64, 64).map(lambda n: n / 16), min_size=1, max_size=9)


def reference(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> list[float]:
    """The transform token by token: scale, keep what min-p keeps, the k likeliest and the nucleus, normalise."""
    if temperature == 0:
        return [float(place == logits.index(max(logits))) for place in range(len(logits))]
    kth = sorted(logits, reverse=True)[min(top_k or len(logits), len(logits)) - 1]
    shares = [math.exp((x - max(logits)) / temperature) for x in logits]  # of the likeliest token's probability
    weights = [share if x >= kth and share >= min_p else 0.0 for x, share in zip(logits, shares, strict=True)]
    distribution = [weight / sum(weights) for weight in weights]
    mass, kept = 0.0, set()
    for place in sorted(range(len(distribution)), key=lambda place: -distribution[place]):
        if mass < top_p:
            kept.add(place)
        mass += distribution[place]
    total = sum(distribution[place] for place in kept)
    return [distribution[place] / total if place in kept else 0.0 for place in range(len(distribution))]


def distribution_of(logits: list[float], *settings: float) -> Tensor:
    return to_distribution(torch.tensor([logits], dtype=torch.float64), SamplingParams(*settings), torch.float64)[0]


@given(
    logits_lists,
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.integers(0, 10),
    st.sampled_from([0.11, 0.53, 0.97, 1.0]),
    st.sampled_from([1, 2, 4, distributions.NUCLEUS]),
)
@example([1.0, 1.0, 1.0], 1.0, 2, 1.0, 256)  # tokens as likely as the k-th stay
@example([0.0, 0.0], 0.0, 0, 1.0, 256)  # the first of equals
def test_the_distribution_is_that_of_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, nucleus: int
):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(distributions, "NUCLEUS", nucleus)
        got = distribution_of(logits, temperature, top_k, top_p).tolist()
    want = reference(logits, temperature, top_k, top_p)
    if top_p < 1:  # which of equally likely tokens the nucleus takes is not promised
        got, want = sorted(got), sorted(want)
    assert got == pytest.approx(want, abs=1e-12)


@given(logits_lists, st.integers(0, 10), st.floats(0.01, 1), st.sampled_from([0.02, 0.3, 0.71, 1.0]))
def test_min_p_comes_before_top_k_and_top_p(logits: list[float], top_k: int, top_p: float, min_p: float):
    settings = (0.9, top_k, top_p, min_p)
    got, want = distribution_of(logits, *settings).tolist(), reference(logits, *settings)
    assert sorted(got) == pytest.approx(sorted(want), abs=1e-12)


@given(logits_lists, st.floats(0.05, 5), st.integers(0, 10), st.floats(0.01, 1))
def test_a_distribution_sums_to_1_and_never_loses_its_likeliest_token(logits, temperature, top_k, top_p):
    distribution = distribution_of(logits, temperature, top_k, top_p)
    assert float(distribution.sum()) == pytest.approx(1, abs=1e-12)
    likeliest = [place for place, logit in enumerate(logits) if logit == max(logits)]
    assert distribution[likeliest].max() == distribution.max() > 0  # which of equally likely ones stay is not promised


@given(logits_lists)
def test_temperature_0_is_the_limit(logits: list[float]):
    logits = [value + (place == 0) * 9 for place, value in enumerate(logits)]  # no ties
    assert torch.allclose(distribution_of(logits, 1e-3), distribution_of(logits, 0.0), atol=1e-12)


def test_a_nucleus_ends_with_the_token_that_reaches_its_mass():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log().tolist()
    assert distribution_of(logits, 1.0, 0, 0.5).tolist() == pytest.approx([1, 0, 0, 0])
    assert distribution_of(logits, 1.0, 0, 0.51).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert distribution_of(logits, 1.0, 0, 0.76)[2:].max() > 0


def test_forbidden_tokens_have_no_mass_even_when_all_are_kept():
    logits = [0.0, -math.inf, 1.0]
    for temperature in (0.0, 0.7):
        assert distribution_of(logits, temperature, 3, 1.0)[1] == 0


@pytest.mark.parametrize("nucleus", [2, 256])
def test_rows_are_transformed_independently(nucleus: int, monkeypatch):
    monkeypatch.setattr(distributions, "NUCLEUS", nucleus)
    logits_NV = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 6)[:, None]
    together = to_distribution(logits_NV, SamplingParams(0.8, 4, 0.9))
    for logits_V, target_probs_V in zip(logits_NV, together, strict=True):
        assert torch.equal(to_distribution(logits_V[None], SamplingParams(0.8, 4, 0.9))[0], target_probs_V)


SAMPLINGS = [SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, 0, 0.8), SamplingParams(1.3, 3)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.sampled_from([torch.float32, torch.float64]))
def test_every_line_has_the_distribution_of_its_own_transform(chosen: list[int], dtype: torch.dtype):
    logits_NV = torch.randn(len(chosen), 7, generator=torch.Generator().manual_seed(len(chosen)))
    target_probs_NV = to_probs(
        logits_NV, [replace(SAMPLINGS[number]) for number in chosen], dtype
    )  # equal, not the same
    assert target_probs_NV.dtype == dtype
    for number, logits_V, target_probs_V in zip(chosen, logits_NV, target_probs_NV, strict=True):
        assert torch.equal(target_probs_V, to_distribution(logits_V[None], SAMPLINGS[number], dtype)[0])


def test_lines_of_equal_transforms_are_transformed_in_one_call_on_the_logits_as_they_are(monkeypatch):
    given_to = []
    monkeypatch.setattr(
        distributions, "to_distribution", lambda logits_NV, params, dtype: given_to.append(logits_NV) or logits_NV
    )
    logits_NV = torch.randn(5, 7)
    to_probs(logits_NV, [SamplingParams(0.5) for _ in range(5)])
    assert [one is logits_NV for one in given_to] == [True]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e-5, 1e6])
@pytest.mark.parametrize("top_p", [0.0, 1e-40, 1.0])
def test_the_ends_of_the_ranges_give_distributions(temperature: float, top_p: float):
    target_probs_V = to_distribution(
        torch.tensor([[80.0, -80.0, 79.0, -math.inf]]), SamplingParams(temperature, 0, top_p)
    )[0]
    assert float(target_probs_V.sum()) == pytest.approx(1)
    assert target_probs_V[0] == target_probs_V.max()
    assert target_probs_V[3] == 0


@pytest.mark.parametrize(
    "settings",
    [(math.nan,), (-1e-9,), (math.inf,), (1e39,), (1.0, -1), (1.0, 0, -0.1), (1.0, 0, 1.1), (1.0, 0, math.nan)],
)
def test_a_transform_out_of_range_is_refused(settings: tuple):
    with pytest.raises(ConfigError, match=r"(temperature|top_k|top_p) must be from 0"):
        SamplingParams(*settings)


class Given:
    """A random source that returns the given number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def uniform(self, distribution: Tensor) -> float:
        return self.number


weights_lists = st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any)


@given(weights_lists)
def test_inversion_gives_every_outcome_its_share(weights: list[int]):
    distribution = torch.tensor(weights, dtype=torch.float64)
    possible = [place for place, weight in enumerate(weights) if weight]
    drawn = {place: EnumeratingRandomSource((place,)) for place in possible}
    for place, rng in drawn.items():
        assert sample(distribution, rng) == place
        assert rng.weight == pytest.approx(weights[place] / sum(weights))


@given(weights_lists, st.floats(0, 1, exclude_max=True))
@example([0, 1, 0], 0.0)
@example([0, 3, 0], 1 - 2**-53)
def test_an_outcome_without_weight_is_never_drawn(weights: list[int], number: float):
    for scale in (1.0, 1 / 3, 1e-30):
        place = sample(torch.tensor(weights, dtype=torch.float64) * scale, Given(number))
        assert weights[place] > 0
        assert sum(weights[:place]) <= number * sum(weights) * (1 + 1e-12)


def test_an_outcome_begins_where_the_one_before_it_ends():
    distribution = torch.tensor([0.25, 0.5, 0.25])
    assert [sample(distribution, Given(number)) for number in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]


def test_every_row_is_drawn_by_its_own_number_in_order():
    distribution = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]])
    assert sample_rows(distribution, [Given(0.2), Given(0.7), Given(0.7)]).tolist() == [0, 1, 0]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 49_152])
def test_every_token_has_the_numbers_of_its_own_weight(size: int):
    """Sums by chunks equal one sum of all weights: at both ends of a token's interval, and with tokens of weight 0."""
    numbers = np.random.default_rng(size)
    weights_V = numbers.random(size) * (numbers.random(size) < 0.3)
    weights_V[numbers.integers(size)] = 0.5  # one at least
    edges = np.concatenate([[0.0], weights_V.cumsum()]) / weights_V.sum()
    for index in numbers.choice(np.flatnonzero(weights_V), 20).tolist():
        inside = 1e-4 * (edges[index + 1] - edges[index])
        for number in (edges[index] + inside, edges[index + 1] - inside):
            assert sample(torch.from_numpy(weights_V), Given(float(number))) == index
    assert weights_V[sample(torch.from_numpy(weights_V), Given(1 - 2**-53))] > 0
    assert sample(torch.zeros(size), Given(0.5)) < size


def test_a_float32_distribution_is_summed_in_double_precision():
    distribution = torch.full((100_000,), 1e-5)
    assert sample(distribution, Given(0.99999 + 5e-6)) == 99_999


@given(weights_lists)
def test_entropy_is_that_of_the_distribution(weights: list[int]):
    distribution = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    want = -sum(p * math.log(p) for p in distribution[0].tolist() if p)
    assert float(entropy(distribution)[0]) == pytest.approx(want, abs=1e-12)


@given(st.floats(0, 1, exclude_max=True))
def test_the_logged_number_is_a_float32_just_below_the_drawn_one(number: float):
    rounded = to_float32_grid(number)
    assert rounded <= number < rounded + 2**-UNIFORM_BITS
    assert float(torch.tensor(rounded, dtype=torch.float32)) == rounded


def test_seeded_draws_depend_on_the_seed_and_the_offset_alone():
    def first(seed: int, offset: int) -> list[float]:
        rng = SeededRandomSource(seed, offset)
        return [rng.uniform(torch.ones(2)) for _ in range(5)]

    assert first(1, 2) == first(1, 2)
    assert len({*first(1, 2), *first(2, 1), *first(1, 3), *first(0, 2)}) == 20
    assert all(0 <= number < 1 for number in first(3, 4))
