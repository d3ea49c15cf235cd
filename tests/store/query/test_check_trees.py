"""Decisions about trees of target tokens are derived again, from all rows of a place."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_runs import bonus, decision, make_unjudged, problems, single, write_run
from tree_making import NODES, OTHER, emit, make_candidate, make_tree

from store.events import DraftSource, Origin, Outcome, TokenDecision
from store.log.manifest import part_path, read_manifest
from store.log.run_log import Commit, RunLog
from store.query.log_reader import LogReader

SOUND = {
    "the first and its second child": (make_tree(NODES, [0.4, 0.6]), ["accepted", "alternative", "accepted"]),
    "the second": (make_tree(NODES, [0.6]), ["alternative", "unjudged", "unjudged", "accepted"]),
    "none": (make_tree(NODES, [0.75]), ["rejected", "unjudged", "unjudged", "alternative"]),
    "none after the first": (make_tree(NODES, [0.0, 0.75]), ["accepted", "rejected", "alternative", "alternative"]),
    "a chain": (make_tree([(5, -1, 0.5), (6, 0, 0.5)], [0.4, 0.4]), ["accepted", "accepted", "undrafted"]),
    "a probability of 0": (make_tree([(5, -1, 0.0), (6, -1, 1.0)], [0.0]), ["alternative", "accepted"]),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_tree_has_no_mismatch(tmp_path: Path, name: str):
    events, outcomes = SOUND[name]
    assert [str(event.outcome) for event in events][: len(outcomes)] == outcomes
    assert problems(tmp_path, events) == []


@pytest.mark.parametrize("rows", [1, 3])
def test_a_tree_that_the_end_of_the_sequence_truncated(tmp_path: Path, rows: int):
    """Decisions after the last emitted token are dropped, so a place may lack its last candidates."""
    assert problems(tmp_path, make_tree(NODES, [0.4, 0.6])[:rows]) == []


def random_nodes(draw: random.Random) -> list[tuple[int, int, float]]:
    """Up to twelve candidates, parents first, whose probabilities sum to less than 1 in each place."""
    parents = [-1]
    while len(parents) < draw.randint(1, 12):
        parents.append(draw.randint(max(-1, len(parents) - 4), len(parents) - 1))
    left = dict.fromkeys(range(-1, len(parents)), 1.0)
    nodes = []
    for index, parent in enumerate(parents):
        probability = single(left[parent] * draw.choice([0.0, 1e-9, draw.random(), 0.9]))
        left[parent] -= probability
        nodes.append((100 + index, parent, probability))
    return nodes


def test_outcomes_agree_with_python_on_the_float32_values(tmp_path: Path):
    """The uniforms are a sum of probabilities, rounded to float32, and its two neighbours: the closest decisions."""
    draw, events = random.Random(2), []
    for offset in range(300):
        nodes = random_nodes(draw)
        uniforms = []
        for _ in nodes:
            edge = sum(node[2] for node in nodes[: draw.randint(1, len(nodes))]) % 1.0
            uniforms.append(single(min(max(0.0, edge + draw.choice([-1, 0, 1]) * 2**-24), 1 - 2**-24)))
        events += make_tree(nodes, uniforms, offset=offset)
    assert {event.outcome for event in events} == set(Outcome) - {Outcome.UNTRANSLATABLE}
    assert problems(tmp_path, events) == []


def change(events: list[TokenDecision], index: int, **changes: object) -> list[TokenDecision]:
    """The block with a changed row at an index."""
    return [replace(event, **changes) if event.index == index else event for event in events]


FIRST, SECOND, NONE = make_tree(NODES, [0.4, 0.6]), make_tree(NODES, [0.6]), make_tree(NODES, [0.75])
NOTHING = {"emitted_id": None, "emitted_bytes": None, "origin": None}
BY_THE_FIRST = "the rejection must be that of the first"
JUDGED_AFTER = "judged exactly when it follows"
ITS_SHARE = "in its share of the place"
BROKEN = {
    "another uniform": ([replace(event, uniform=0.8) if event.uniform == 0.4 else event for event in FIRST], ITS_SHARE),
    "a lower probability before": (change(SECOND, 0, target_levels=(0.125,)), ITS_SHARE),
    "accepted by the next": (change(SECOND, 3, target_levels=(0.0625,)), ITS_SHARE),
    "an alternative that was in its share": (change(FIRST, 0, outcome=Outcome.ALTERNATIVE, **NOTHING), ITS_SHARE),
    "the rejection at another": (
        [emit(one, Outcome.REJECTED, OTHER, Origin.RESIDUAL) if one.index == 3 else one
         for one in change(NONE, 0, outcome=Outcome.ALTERNATIVE, **NOTHING)],
        BY_THE_FIRST,
    ),
    "no rejection": (change(NONE, 0, outcome=Outcome.ALTERNATIVE, **NOTHING), BY_THE_FIRST),
    "an alternative that emits": (change(FIRST, 3, emitted_id=8, origin=Origin.ACCEPTED), "must emit nothing"),
    "two of a place": (change(FIRST, 3, emitted_id=8, origin=Origin.ACCEPTED), "at most one candidate of a place"),
    "uniforms of a place": (change(FIRST, 3, uniform=0.41), "must share the uniform"),
    "no uniform": (change(FIRST, 3, uniform=None), "must have a uniform and one level"),
    "two levels": (change(FIRST, 3, drafter_levels=(1.0, 1.0), target_levels=(0.5, 0.5)), "a uniform and one level"),
    "a drafter's probability": (change(FIRST, 3, drafter_levels=(0.5,)), "what was copied must have had probability 1"),
    "a uniform without a judgement": (change(SECOND, 1, uniform=0.5), "must have no uniform"),
    "judged after an alternative": (change(SECOND, 1, outcome=Outcome.ALTERNATIVE, uniform=0.5), JUDGED_AFTER),
    "accepted after an alternative": ([
        emit(replace(one, uniform=0.1), Outcome.ACCEPTED, 6, Origin.ACCEPTED) if one.index == 1 else one
        for one in SECOND
    ], JUDGED_AFTER),
    "not judged after an accepted one": (change(FIRST, 1, outcome=Outcome.UNJUDGED, uniform=None), JUDGED_AFTER),
    "a parent that comes later": (change(FIRST, 1, parent=3), "must follow the text or an earlier candidate"),
    "a parent that is no candidate": (change(FIRST, 3, parent=9), "must follow the text or an earlier candidate"),
    "its own parent": (change(FIRST, 3, parent=3), "must follow the text or an earlier candidate"),
    "another position": (change(FIRST, 3, position=1), "the position of a candidate"),
    "the position of its parent": (change(SECOND, 2, position=0), "the position of a candidate"),
    "a missing row": ([event for event in FIRST if event.index != 1], "indices of candidates"),
    "twice the same token": (change(FIRST, 3, proposed_id=5), "must be different tokens"),
    "a bonus after a rejection": ([*NONE, bonus(index=4, position=1, drafter=DraftSource.MEMORY)], "after a rejection"),
    "a bonus after a candidate with others": (
        [*FIRST[:1], *[replace(one, outcome=Outcome.ALTERNATIVE, **NOTHING) for one in FIRST[1:3]], FIRST[3],
         replace(FIRST[4], position=1)],
        "a bonus must come after an accepted candidate",
    ),
    "a bonus with another position": (change(FIRST, 4, position=3), "a bonus must come after"),
    "a bonus with another index": ([*FIRST[:4], replace(FIRST[4], index=5)], "a bonus must come after"),
    "a memory without a tree": ([decision(drafter=DraftSource.MEMORY, drafter_levels=(1.0,))], "candidates of a tree"),
    "an alternative without a tree": ([make_unjudged(outcome=Outcome.ALTERNATIVE)], "candidates of a tree"),
    "a candidate in pieces": (change(FIRST, 3, pieces=(7,)), "has no pieces"),
    "a bonus in the tree": ([make_candidate(0, 5, -1, 0.5, outcome=Outcome.UNDRAFTED, emitted_id=5,
                                            origin=Origin.BONUS)], "a proposed target token"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_is_named(tmp_path: Path, name: str):
    events, words = BROKEN[name]
    found = problems(tmp_path, events)
    assert any(words in problem for problem in found), found


def test_the_probability_of_a_candidate_is_that_of_the_target(tmp_path: Path):
    with LogReader([write_run(tmp_path, change(FIRST, 0, uniform=0.9))]) as log:
        rows = log.check().mismatches.to_pylist()
    assert {(row["index"], row["acceptance_probability"]) for row in rows} == {(0, 0.5), (3, 0.25)}


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_tree_with_rows_in_a_skipped_damaged_part_is_no_mismatch(tmp_path: Path, damaged: int):
    events = make_tree(NODES, [0.6], begin=0)
    with RunLog(tmp_path) as log:
        for part in (events[:2], events[2:]):
            for event in part:
                log.append(event)
            log.commit(Commit(dict), wait=True)
    path = part_path(tmp_path, read_manifest(tmp_path).tables["decisions"][damaged])
    path.write_bytes(path.read_bytes()[:-1])
    with LogReader([tmp_path], skip_damaged=True) as log:
        found = log.check()
    assert found.decisions in (2, 3)
    assert found.mismatches.to_pylist() == []
