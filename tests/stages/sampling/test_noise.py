"""Noise: races that have the law of their weights, with numbers that others can compute again."""

import numpy as np
import pytest
import torch

from stages.sampling.noise import Noise
from store.noise import number_of

SIZE = 300


def expected_order(noise: Noise, weights: np.ndarray, place: int, names: np.ndarray) -> list[int]:
    """The order of all arrivals, computed one by one."""
    numbers = np.array([noise.number(place, int(name)) for name in names])
    with np.errstate(divide="ignore"):
        times = -np.log(numbers) / weights
    return [int(index) for index in np.argsort(times) if weights[index] > 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_are_those_of_the_whole_race(dtype: torch.dtype):
    random = np.random.default_rng(3)
    for place in range(40):
        noise, names = Noise.from_seed(place % 3, 7), random.permutation(10 * SIZE)[:SIZE]
        weights = random.dirichlet(np.full(SIZE, 0.1)).astype(np.float32)
        weights[weights < 1e-3] = 0
        order = expected_order(noise, weights, place, names)
        for most in (1, 3, SIZE):
            found = noise.race(torch.from_numpy(weights).to(dtype), place, most, names)
            assert [one.which for one in found] == order[:most]
            assert sorted(one.time for one in found) == [one.time for one in found]


def test_an_index_has_its_own_number_where_there_are_no_names():
    weights_V, noise = torch.full((SIZE,), 1 / SIZE), Noise.from_seed(1, 2)
    assert noise.race(weights_V, 5, 4) == noise.race(weights_V, 5, 4, np.arange(SIZE))


def test_what_is_not_a_number_never_arrives():
    assert Noise.from_seed(0, 0).race(torch.tensor([torch.nan, 0.0, torch.nan]), 0, 2) == []


def test_numbers_are_uniform_and_those_of_seeds_streams_places_and_tokens_have_nothing_in_common():
    key = Noise.from_seed(4, 9).key
    numbers = number_of(*(np.full(4000, key, np.uint64), np.zeros(4000, np.uint64), np.arange(4000, dtype=np.uint64)))
    assert np.histogram(numbers, 10, (0, 1))[0] == pytest.approx(400, abs=80)
    others = [Noise.from_seed(4, 10), Noise.from_seed(5, 9)]
    for other in others:
        again = np.array([other.number(0, token) for token in range(2000)])
        assert abs(np.corrcoef(numbers[:2000], again)[0, 1]) < 0.08
    at_next = np.array([Noise(key).number(1, token) for token in range(2000)])
    assert abs(np.corrcoef(numbers[:2000], at_next)[0, 1]) < 0.08
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.08
