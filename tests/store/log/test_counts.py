"""Stored counts of joined parts equal counts of the decisions, by SQL and by Arrow."""

from dataclasses import fields, replace

import pyarrow as pa
import pytest
from synthetic_runs import (
    bonus,
    commit_changes,
    decision,
    make_rejection,
    make_unjudged,
    prompt,
    small_run_events,
    write_run,
)
from tree_making import NODES, make_tree

from store.events import DraftSource, Translation
from store.log.compaction import compact, count_decisions
from store.log.manifest import part_path, read_manifest
from store.log.parts import parquet_bytes
from store.log.schema import COUNTS, to_table
from store.query.log_reader import LogReader, recipes


def varied_events():
    """Decisions that differ in each column that groups the counts, and in other columns."""
    pair = {
        "pieces": (8, 9),
        "translation": Translation.NGRAM,
        "drafter_levels": (0.5, 1.0),
        "target_levels": (1.0, 0.5),
    }
    return [
        decision(),
        decision(offset=1, position=1, drafter_levels=(0.25,), target_levels=(0.75,)),
        decision(offset=2, dataset="code"),
        decision(offset=3, target="small"),
        decision(offset=4, drafter_version=1),
        decision(offset=5, drafter=DraftSource.LOOKUP, drafter_levels=(1.0,)),
        decision(offset=6, index=1),
        decision(offset=7, **pair),
        make_rejection(offset=8),
        make_rejection(offset=9, emitted_id=73, emitted_bytes=b"!"),
        make_rejection(offset=10, proposed_id=None, proposed_bytes=None),
        make_rejection(offset=11, emitted_id=73, emitted_bytes=b"!"),
        make_unjudged(offset=12),
        bonus(offset=13),
    ]


@pytest.mark.parametrize("table", COUNTS)
def test_arrow_and_sql_give_the_same_counts(tmp_path, table):
    """SQL counts a run's own parts when they are queried; Arrow counts joined parts when they are written."""
    run = write_run(tmp_path / "run", varied_events())
    with LogReader([run]) as log:
        by_sql = log.select(f"SELECT * EXCLUDE (run, seq) FROM {table}")
    counted = count_decisions(to_table("decisions", 0, varied_events()))[table]
    assert set(counted.schema.names) == {"seq", *(field.name for field in fields(COUNTS[table]))}
    columns = by_sql.schema.names
    assert sorted(map(repr, by_sql.to_pylist())) == sorted(map(repr, counted.select(columns).to_pylist()))


def parts_of_run(folder, parts):
    """A finished run with one part of decisions per list of events."""
    from store.log.run_log import Commit, RunLog

    with RunLog(folder) as log:
        for events in parts:
            for event in events:
                log.append(event)
            log.commit(Commit(dict), wait=True)
    return folder


def shift_offsets(events, by):
    """The same events with other prompts, so that their order is unique."""
    return [replace(event, offset=event.offset + by) if hasattr(event, "offset") else event for event in events]


def test_recipes_give_the_same_before_and_after_counting(tmp_path):
    trees = [*make_tree(NODES, [0.4, 0.6], offset=14), *make_tree(NODES, [0.75], offset=15)]
    parts = [varied_events(), [*varied_events(), *trees, prompt()], small_run_events()]
    run = parts_of_run(tmp_path / "run", [shift_offsets(events, 100 * number) for number, events in enumerate(parts)])
    with LogReader([run]) as log:
        before = {name: log.recipe(name).to_pylist() for name in recipes()}
        assert log.select("SELECT count(seq) AS stored FROM counts_by_token").to_pylist() == [{"stored": 0}]
    compact(run, counted=1)
    with LogReader([run]) as log:
        assert log.select("SELECT count(seq) > 0 AS stored FROM counts_by_token").to_pylist() == [{"stored": True}]
        assert {name: log.recipe(name).to_pylist() for name in recipes()} == before


def test_the_check_finds_a_count_that_contradicts_the_decisions(tmp_path):
    run = parts_of_run(tmp_path / "run", [small_run_events(), small_run_events()])
    compact(run, counted=1)
    with LogReader([run]) as log:
        assert log.check().miscounts.num_rows == 0
    (part,) = read_manifest(run).tables["counts_by_version"]
    forge(run, part)
    with LogReader([run], skip_damaged=False) as log:
        (row, *_) = log.check().miscounts.to_pylist()
    assert (row["counts"], row["kept"] - row["found"]) == ("counts_by_version", 1)


def forge(run, part):
    """Add one to a count in an otherwise valid file."""
    import pyarrow.parquet as pq

    path = part_path(run, part)
    rows = pq.read_table(path, partitioning=None)
    place = rows.schema.get_field_index("decisions")
    numbers = rows["decisions"].to_pylist()
    forged = rows.set_column(place, rows.schema.field(place), pa.array([numbers[0] + 1, *numbers[1:]], pa.int32()))
    path.write_bytes(parquet_bytes("counts_by_version", forged))
    commit_changes(run)
