"""The gate tells harm from noise."""

import math

import pytest

from stages.blocks import Lesson
from stages.gate import Gate, Scores, falls, mean


def lesson_of(offset: int, target: str = "big") -> Lesson:
    return Lesson(offset, target, (1, 2), (), (), ())


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([6.0, 6.0, 6.0], False),  # the same
        ([5.0, 5.0, 5.0], True),  # a tenth less everywhere: no doubt
        ([5.9, 5.9, 5.9], False),  # a hundredth less: tolerated
        ([7.0, 6.0, 2.0], False),  # a tenth less on the whole, but the lessons do not agree
        ([9.0, 9.0, 9.0], False),
        ([math.nan, 6.0, 6.0], True),
    ],
)
def test_a_fall_counts_where_it_exceeds_the_tolerance_and_the_noise(second: list[float], expected: bool):
    assert falls([(6.0, 10, total) for total in second], 0.02) is expected


def test_the_noise_is_one_standard_error_of_the_mean_difference():
    # Differences 0, 0, 3 of 10 positions each: mean 0.1, standard error 0.1.
    totals = [(6.0, 10, 6.0), (6.0, 10, 6.0), (6.0, 10, 3.0)]
    assert falls(totals, -0.001) is True
    assert falls(totals, 0.001) is False


@pytest.mark.parametrize("lessons", [0, 1, 2])
def test_fewer_than_three_lessons_tell_nothing(lessons: int):
    assert falls([(9.0, 10, 0.0)] * lessons, 0.0) is False


def test_every_target_is_judged_by_its_own_lessons():
    lessons = [lesson_of(number, target) for target in ("big", "small") for number in range(3)]
    before: Scores = dict.fromkeys(lessons, (5.0, 10))
    after: Scores = {lesson: (9.0 if lesson.target == "big" else 4.0, 10) for lesson in lessons}
    gate = Gate(["big", "small"], 3, 0.05, lambda model, asked: {})
    assert mean(after.values()) > mean(before.values())
    assert gate.losers(before, after) == ["small"]


def test_scores_are_made_once_and_forgotten_with_their_lesson():
    asked: list[list[int]] = []

    def measure(model: object, lessons: list[Lesson]) -> Scores:
        asked.append([lesson.offset for lesson in lessons])
        return dict.fromkeys(lessons, (1.0, 2))

    gate = Gate(["big"], 2, 0.0, measure)  # type: ignore[arg-type]
    known: Scores = {}
    for offset in range(3):
        gate.hold_out(lesson_of(offset))
        gate.scores(None, known, gate.held_out)  # type: ignore[arg-type]
    assert asked == [[0], [1], [2]]
    assert [lesson.offset for lesson in known] == [1, 2]


def test_the_mean_is_per_position():
    assert mean([(1.0, 1), (0.0, 3)]) == 0.25
    assert mean([]) is None
