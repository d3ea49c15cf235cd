"""The log is checked against itself: every judged decision is derived again from its row."""

import math
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from event_making import make_completed
from synthetic_runs import (
    bonus,
    change_manifest,
    commit_changes,
    decision,
    make_rejection,
    make_unjudged,
    problems,
    single,
    small_run_events,
    two_blocks,
    write_run,
)

from store.events import DraftSource, Origin, Translation
from store.log.manifest import part_path, read_manifest
from store.noise import number_of
from store.query.log_reader import LogReader


def test_a_sound_log_has_no_mismatch_and_reports_the_derived_decisions(tmp_path):
    with LogReader([write_run(tmp_path, small_run_events())]) as log:
        found = log.check()
    assert (found.decisions, found.judged, found.mismatches.num_rows) == (75, 45, 0)


def test_a_changed_number_in_the_file_is_found(tmp_path):
    run = write_run(tmp_path, two_blocks(0, "docs"))
    (part,) = read_manifest(run).tables["decisions"]
    path = part_path(run, part)
    rows = pq.read_table(path)
    column = rows.schema.get_field_index("uniform")
    forged = rows.set_column(column, rows.schema.field(column), pa.array([0.25, 0.25, None, 0.25, None], pa.float32()))
    pq.write_table(forged, path)
    commit_changes(run)
    with LogReader([run]) as log:
        (row,) = log.check().mismatches.to_pylist()
    assert (row["block"], row["index"], row["outcome"], row["uniform"]) == (0, 1, "rejected", 0.25)
    assert row["acceptance_probability"] == 0.5
    assert "product of the levels" in row["problem"]


def test_outcomes_agree_with_python_on_the_float32_values(tmp_path):
    """The uniforms are the product, rounded to float32, and its two neighbours: the closest possible decisions."""
    draw = random.Random(1)
    events = []
    for offset in range(400):
        count = draw.randint(1, 4)
        drafter = tuple(single(draw.uniform(0.001, 1)) for _ in range(count))
        target = tuple(single(draw.uniform(0, 1)) for _ in range(count))
        product = math.prod(min(1.0, t / d) for t, d in zip(target, drafter, strict=True))
        ulp = math.ulp(product) * 2**29
        uniform = single(min(product + draw.choice([-1, 0, 1]) * ulp, single(1 - 2**-24)))
        row = decision if uniform < product else make_rejection
        levels = {"drafter_levels": drafter, "target_levels": target, "uniform": uniform}
        events.append(row(offset=offset, pieces=(1,) * count, translation=Translation.NGRAM, **levels))
    assert len({event.outcome for event in events}) == 2
    assert problems(tmp_path, events) == []


BROKEN = {
    "levels": ([decision(drafter_levels=(0.5, 0.5))], "as many target as drafter levels"),
    "no levels": ([decision(drafter_levels=(), target_levels=())], "as many target as drafter levels"),
    "no uniform": ([make_rejection(uniform=None)], "must have a uniform"),
    "accepted another": ([decision(emitted_id=99)], "emitted as proposed"),
    "accepted without origin": ([decision(origin=None)], "emitted as proposed"),
    "rejected kept": ([make_rejection(origin=Origin.ACCEPTED)], "origin residual"),
    "rejected without a token": ([make_rejection(emitted_id=None, emitted_bytes=None)], "origin residual"),
    "unjudged emitted": ([make_unjudged(emitted_id=5, origin=Origin.BONUS)], "must emit nothing"),
    "undrafted is no bonus": ([bonus(origin=Origin.ACCEPTED)], "origin bonus"),
    "judged after a rejection": ([make_rejection(), decision(index=1, position=1)], "after a rejection"),
    "gap": ([decision(), decision(block=1, position=2)], "positions"),
    "not from zero": ([decision(position=1)], "positions"),
    "twice": ([decision(), decision(block=1)], "positions"),
    "copied with a chance": (
        [decision(drafter=DraftSource.LOOKUP, drafter_levels=(1.0, 0.5), target_levels=(1.0, 0.5))],
        "what was copied must have had probability 1",
    ),
    "bonus after a rejection": ([make_rejection(), bonus(index=1, position=1)], "after a rejection"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_kind_of_contradiction_is_named_once(tmp_path, name):
    events, words = BROKEN[name]
    (problem,) = problems(tmp_path, events)
    assert words in problem


def test_copied_tokens_with_probability_one_are_sound(tmp_path):
    copied = {"drafter": DraftSource.LOOKUP, "drafter_levels": (1.0,), "head_estimate": None}
    rejected = make_rejection(**copied, index=1, position=1, target_levels=(0.125,))
    assert problems(tmp_path, [decision(**copied, target_levels=(0.5,)), rejected]) == []


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 7, 20, 1000])
def test_a_check_in_pieces_gives_the_same_result(tmp_path, at_once):
    events = [*small_run_events(), make_rejection(offset=20, uniform=0.1), decision(offset=21, uniform=0.9, position=1)]
    with LogReader([write_run(tmp_path, events)]) as log:
        found = log.check(at_once)
        assert found.mismatches.equals(log.recipe("check"))
        assert log.select("FROM decisions").num_rows == 77, "the whole log can be queried again"
    assert (found.decisions, found.judged) == (77, 47)
    assert found.mismatches["offset"].to_pylist() == [20, 21]


def test_the_numbers_of_noise_are_computed_again(tmp_path):
    key, greedy = 77, [decision(offset=1, drafter_levels=(1.0,), target_levels=(1.0,))]
    levels = {"drafter_levels": (1.0,), "target_levels": (1.0,)}
    numbers = [math.floor(number_of(key, place, 5) * 2**24) / 2**24 for place in range(3)]
    events = [
        decision(position=place, block=place, proposed_id=5, emitted_id=5, uniform=number, **levels)
        for place, number in enumerate([numbers[0], numbers[2], numbers[2]])
    ]
    prompts = [make_completed(0, noise=key), make_completed(1)]
    (found,) = problems(tmp_path, [*events, *greedy, *prompts])
    assert "number of this place and token" in found


def test_a_log_of_version_1_is_read(tmp_path):
    """It lacks the column of noise."""
    run = write_run(tmp_path, [*small_run_events(), make_completed(99)])
    for part in read_manifest(run).tables["prompts"]:
        path = part_path(run, part)
        pq.write_table(pq.read_table(path).drop_columns(["noise"]), path)
    commit_changes(run)
    change_manifest(run, lambda content: content.update(schema_version=1))
    with LogReader([run]) as log:
        assert log.select("SELECT noise FROM prompts")["noise"].null_count > 0
        found = log.check()
    assert (found.decisions, found.mismatches.num_rows) == (75, 0)
