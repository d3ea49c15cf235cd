"""Rounds of the loop: the order of the arms, the first difference of two texts, and the work that events report."""

from dataclasses import replace

import pytest

from pipeline.run.rounds import RoundClock, first_difference, rotate, work_of
from store.events import BlockDone, DraftSource, Updated


def test_everyone_begins_once_in_as_many_rounds() -> None:
    turns = [rotate("abc", number) for number in range(4)]
    assert turns == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2, 3], [1, 5, 3], 1), ([4], [5], 0), ([1, 2], [1, 2, 3], None), ([1, 2], [1, 2], None), ([], [1], None)],
)
def test_texts_part_at_the_first_token_that_differs(one: list[int], other: list[int], place: int | None) -> None:
    assert first_difference(one, other) == first_difference(other, one) == place


def test_the_clock_of_rounds_stops_between_them() -> None:
    clock = RoundClock()
    assert clock() == clock.go() == 0.0
    while clock() == 0.0:
        pass
    ended = clock.stop()
    assert 0.0 < ended == clock() == clock.go() <= clock()


def block(offset: int, rows: int, drafted: int, proposed: int, drafter: DraftSource = DraftSource.MODEL) -> BlockDone:
    return BlockDone(offset, "tiny", 0, rows, drafted, proposed, proposed, 1, 2, 0.25, 0.5, 1.0, drafter)


def test_blocks_of_rows_that_were_stepped_together_make_a_step() -> None:
    update = Updated(
        offset=0, target="t", part="drafter", loss_name="trie", loss=1.0, positions=1, acceptance_before=None,
        acceptance_after=None, acceptance_floor=None, tokens_gained=None, served=True, reason="", seconds=3.0,
        waited=1.0, drafter_version=1, head_version=0,
    )  # fmt: skip
    looked_up = block(1, 1, 9, 8, DraftSource.LOOKUP)
    in_place = replace(update, seconds=1.0, waited=1.5)  # handing in takes a little, too
    found = work_of([block(0, 2, 3, 2), block(1, 2, 1, 1), update, in_place, looked_up], {"log": 0.125}, 0.5)
    assert [(step.drafted, step.proposed) for step in found.steps] == [((3, 1), (2, 1)), ((0,), (8,))]
    assert (found.blocks, found.judged, found.accepted) == (3, 3, 2)
    assert (found.decode, found.translate, found.verify) == (0.75, 1.5, 3.0)
    assert (found.learning, found.learning_beside, found.log) == (3.0, 1.0, 0.125)
