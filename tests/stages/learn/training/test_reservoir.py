"""The replay buffer: an even sample of all that was ever added."""

from collections import Counter
from random import Random

from stages.contract.blocks import TrainingExample
from stages.learn.training.update import Reservoir


def example_of(offset: int) -> TrainingExample:
    return TrainingExample(offset, "big", (1, 2), (), (), ())


def fill(size: int, count: int, seed: int = 0) -> Reservoir:
    kept = Reservoir(size, Random(seed))
    for offset in range(count):
        kept.add(example_of(offset))
    return kept


def offsets(examples: list[TrainingExample]) -> list[int]:
    return sorted(example.offset for example in examples)


def test_no_more_is_kept_than_the_size_and_nothing_is_drawn_twice():
    found = offsets(fill(5, 100).sample(9))
    assert len(found) == len(set(found)) == 5
    assert len(fill(5, 100).sample(3)) == 3
    assert fill(0, 10).sample(3) == []


def test_every_example_has_the_same_chance_however_long_ago_it_was():
    """Of 40 examples 10 are kept, in 2,000 reservoirs: each about 500 times."""
    kept = Counter(offset for seed in range(2000) for offset in offsets(fill(10, 40, seed).sample(10)))
    assert set(kept) == set(range(40))
    assert all(400 < number < 600 for number in kept.values()), "five standard deviations"
