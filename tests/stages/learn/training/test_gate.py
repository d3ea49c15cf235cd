"""The gate distinguishes harm from noise."""

import math

import pytest

from stages.contract.blocks import TrainingExample
from stages.learn.training.update import Gate, Scores, is_significant_fall, mean_score


def example_of(offset: int, target: str = "big") -> TrainingExample:
    return TrainingExample(offset, target, (1, 2), (), (), ())


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([6.0, 6.0, 6.0], False),  # the same
        ([5.0, 5.0, 5.0], True),  # a tenth less everywhere: no doubt
        ([5.9, 5.9, 5.9], False),  # a hundredth less: tolerated
        ([7.0, 6.0, 2.0], False),  # a tenth less on the whole, but the examples do not agree
        ([9.0, 9.0, 9.0], False),
        ([math.nan, 6.0, 6.0], True),
    ],
)
def test_a_fall_counts_where_it_exceeds_the_tolerance_and_the_noise(second: list[float], expected: bool):
    assert is_significant_fall([(6.0, 10, total) for total in second], 0.02) is expected


def test_every_target_is_judged_by_its_own_examples():
    examples = [example_of(number, target) for target in ("big", "small") for number in range(3)]
    before: Scores = dict.fromkeys(examples, (5.0, 10))
    after: Scores = {example: (9.0 if example.target == "big" else 4.0, 10) for example in examples}
    gate = Gate(["big", "small"], 3, 0.05, lambda model, examples: {})
    assert mean_score(after.values()) > mean_score(before.values())
    assert gate.find_losers(before, after) == ["small"]


def test_scores_are_made_once_and_forgotten_with_their_example():
    measured: list[list[int]] = []

    def measure(model: object, examples: list[TrainingExample]) -> Scores:
        measured.append([example.offset for example in examples])
        return dict.fromkeys(examples, (1.0, 2))

    gate = Gate(["big"], 2, 0.0, measure)  # type: ignore[arg-type]
    known: Scores = {}
    for offset in range(3):
        gate.hold_out(example_of(offset))
        gate.update_scores(None, known, gate.held_out)  # type: ignore[arg-type]
    assert measured == [[0], [1], [2]]
    assert [example.offset for example in known] == [1, 2]


def test_a_small_fall_below_the_baseline_is_not_taken_for_noise():
    """Means per token: .50 before, .49 after; a fall within one standard error."""
    gate = Gate(["big"], 12, 0.01, lambda _model, _examples: {})
    examples = [example_of(offset) for offset in range(4)]
    before = dict.fromkeys(examples, (5.0, 10))
    after = dict(zip(examples, [(4.0, 10), (5.6, 10), (4.5, 10), (5.5, 10)], strict=True))
    for least, losers in ((4.8, []), (5.0, ["big"]), (5.5, ["big"])):
        baseline = dict.fromkeys(examples, (least, 10))
        assert gate.find_losers(before, after, baseline) == losers, least
    assert gate.find_losers(before, after) == []
    gained = dict.fromkeys(examples, (5.1, 10))
    assert gate.find_losers(before, gained, dict.fromkeys(examples, (9.0, 10))) == [], "a gain passes below it too"
    assert gate.find_losers(*({one: scores[one] for one in examples[:2]} for scores in (before, after, before))) == []
