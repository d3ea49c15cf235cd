"""The size of a log by column, its decisions as events, and larger logs resampled from it."""

import pytest
from synthetic_runs import (
    bonus,
    decision,
    make_rejection,
    make_unjudged,
    prompt,
    small_run_events,
    two_blocks,
    write_run,
)

from store.errors import RunError
from store.log.committed_events import logged_decisions
from store.log.compaction import compact
from store.log.manifest import part_path, read_manifest
from store.log.measurement import REST, bytes_by_column, resample
from store.log.rollups import COUNTS
from store.log.run_log import Commit, RunLog
from store.log.schema import schema_of
from store.query.log_reader import LogReader, recipes


def test_bytes_by_column_add_up_to_the_files(tmp_path):
    run = write_run(tmp_path, small_run_events())
    sizes = bytes_by_column(run)
    parts = read_manifest(run).tables["decisions"]
    assert set(sizes) == {*schema_of("decisions").names, REST}
    assert sum(sizes.values()) == pytest.approx(sum(part.bytes for part in parts) / 75)
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert bytes_by_column(write_run(tmp_path / "none", [])) == {}


def test_decisions_are_read_back_as_events(tmp_path):
    events = [
        decision(pieces=(1, 2), target_levels=(0.5, 0.25), drafter_levels=(0.5, 0.5)),
        make_rejection(),
        make_unjudged(),
        bonus(),
    ]
    run = write_run(tmp_path, events)
    assert logged_decisions(run, 10) == [*events[:1], make_rejection(head_estimate=0.349609375), *events[2:]]
    assert len(logged_decisions(run, 2)) == 2


def test_parts_after_the_requested_decisions_are_not_read(tmp_path):
    with RunLog(tmp_path) as log:
        for offset in range(2):
            log.append(decision(offset=offset))
            log.commit(Commit(dict), wait=True)
    part_path(tmp_path, read_manifest(tmp_path).tables["decisions"][1]).unlink()
    assert logged_decisions(tmp_path, 1) == [decision()]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with prompts of 5 and of 1 decisions, which are interleaved."""
    long, short = two_blocks(0, "docs"), [decision(offset=1, prompt_id="code-1", dataset="code")]
    events = [*long[:2], *short, *long[2:]]
    for offset, dataset in enumerate(("docs", "code")):
        events.append(prompt(offset=offset, dataset=dataset, prompt_id=f"{dataset}-{offset}", drafter_version=offset))
    return write_run(tmp_path_factory.mktemp("source") / "run", events)


@pytest.mark.parametrize("part_rows", [40, 1000])
def test_a_larger_log_holds_whole_prompts_of_the_source_with_new_numbers(tmp_path, source, part_rows):
    made = resample(source, tmp_path / "large", 200, part_rows=part_rows)
    assert 200 <= made < 205
    with LogReader([tmp_path / "large"], skip_damaged=True) as log:
        assert log.damaged == []
        found = log.check()
        assert (found.decisions, found.mismatches.num_rows, found.miscounts.num_rows) == (made, 0, 0)
        assert log.select("FROM decisions ORDER BY seq")["seq"].to_pylist() == list(range(made))
        sizes = log.select('SELECT dataset, count(*) AS n FROM decisions GROUP BY "offset", dataset').to_pylist()
        assert {(row["dataset"], row["n"]) for row in sizes} == {("docs", 5), ("code", 1)}
        prompts = log.select("FROM prompts ORDER BY seq").to_pylist()
        assert [row["offset"] for row in prompts] == list(range(len(sizes)))
        assert [row["drafter_version"] for row in prompts] == list(range(len(sizes)))
        assert [row["finished"] for row in prompts] == [number + 1.0 for number in range(len(sizes))]
        for name in recipes():
            log.recipe(name)
    parts = read_manifest(tmp_path / "large").tables
    assert len(parts["decisions"]) == len(parts["counts_by_token"]) == (5 if part_rows == 40 else 1)


def test_a_log_without_counts_can_be_resampled_and_compacted(tmp_path, source):
    resample(source, tmp_path, 100, part_rows=10, counted=False)
    assert [read_manifest(tmp_path).tables[table] for table in COUNTS] == [()] * 3
    assert compact(tmp_path).parts_after == 2


def test_the_same_seed_draws_the_same_log(tmp_path, source):
    for name in ("a", "b"):
        resample(source, tmp_path / name, 50, seed=3)
    resample(source, tmp_path / "c", 50, seed=4)
    digests = {name: read_manifest(tmp_path / name).tables["decisions"][0].sha256 for name in "abc"}
    assert digests["a"] == digests["b"] != digests["c"]


def test_an_empty_source_and_an_occupied_folder_are_refused(tmp_path, source):
    with pytest.raises(RunError, match="prompts and decisions"):
        resample(write_run(tmp_path / "empty", []), tmp_path / "a", 10)
    with pytest.raises(RunError, match="must not hold"):
        resample(source, source, 10)
