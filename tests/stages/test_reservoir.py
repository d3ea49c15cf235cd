"""The replay buffer: an even sample of all that was ever added."""

from collections import Counter
from random import Random

from stages.blocks import Lesson
from stages.reservoir import Reservoir


def lesson_of(offset: int) -> Lesson:
    return Lesson(offset, "big", (1, 2), (), (), ())


def filled(size: int, count: int, seed: int = 0) -> Reservoir:
    kept = Reservoir(size, Random(seed))
    for offset in range(count):
        kept.add(lesson_of(offset))
    return kept


def offsets(lessons: list[Lesson]) -> list[int]:
    return sorted(lesson.offset for lesson in lessons)


def test_while_there_is_room_everything_is_kept():
    assert offsets(filled(5, 4).draw(9)) == [0, 1, 2, 3]


def test_no_more_is_kept_than_the_size_and_nothing_is_drawn_twice():
    found = offsets(filled(5, 100).draw(9))
    assert len(found) == len(set(found)) == 5
    assert len(filled(5, 100).draw(3)) == 3
    assert filled(0, 10).draw(3) == []


def test_every_lesson_has_the_same_chance_however_long_ago_it_was():
    """Of 40 lessons 10 are kept, in 2,000 reservoirs: each about 500 times."""
    kept = Counter(offset for seed in range(2000) for offset in offsets(filled(10, 40, seed).draw(10)))
    assert set(kept) == set(range(40))
    assert all(400 < number < 600 for number in kept.values()), "five standard deviations"


def test_equal_seeds_keep_and_draw_alike():
    assert [one.offset for one in filled(5, 50, 3).draw(4)] == [one.offset for one in filled(5, 50, 3).draw(4)]
