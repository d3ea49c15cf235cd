"""Logs of earlier versions can be read unchanged.

Version 3 had no checkpoints, counts and rounding; version 4 had no trees of candidates.
"""

import json
import shutil
from pathlib import Path

import pytest
import typer
from synthetic_runs import block
from tree_making import NODES, make_tree
from typer.testing import CliRunner

from pipeline.cli.log import check
from store.errors import RunError
from store.log.compaction import compact
from store.log.manifest import MANIFEST, read_manifest
from store.log.parts import read_part
from store.log.rollups import COUNTS
from store.log.run_log import RunLog
from store.log.schema import SCHEMA_VERSION, TABLES, schema_of, to_current_schema
from store.query.log_reader import VIEWS, LogReader, recipes
from store.query.summary import summarize

GOLDEN = Path(__file__).parent / "log-v3"
VERSION_4 = Path(__file__).parent / "log-v4"  # from an unfinished run
ADDED_TO_SUMMARY = ("acceptance_interval", "judged_tokens", "recall_seconds")
ROWS = {
    "decisions": 597,
    "tokens": 563,
    "blocks": 547,
    "prompts": 26,
    "updates": 5,
    "drifts": 1,
    "recalls": 1,
    "versions": 6,
}


@pytest.fixture
def copied(tmp_path):
    """A copy of the golden log, which tests may change."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "log-v3"))


def test_the_golden_log_is_of_version_3():
    assert json.loads((GOLDEN / MANIFEST).read_bytes())["schema_version"] == 3
    manifest = read_manifest(GOLDEN)
    assert (manifest.finished, manifest.checkpoint) == (True, None)


def test_every_view_has_its_rows():
    with LogReader([GOLDEN]) as log:
        assert {view: log.select(f"FROM {view}").num_rows for view in VIEWS if view not in COUNTS} == ROWS
        for table in ("counts_by_version", "counts_by_place"):
            assert log.select(f"SELECT sum(decisions) AS n FROM {table}").to_pylist() == [{"n": 597}]


EMPTY = ("check", "ngrams-that-pay", "memory-calibration", "policy-values", "near-misses")


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_runs_and_returns_rows_unless_listed_as_empty(name):
    with LogReader([GOLDEN]) as log:
        assert (log.recipe(name).num_rows == 0) == (name in EMPTY)


def test_the_summary_equals_the_one_that_version_3_wrote():
    found, written = summarize(GOLDEN), json.loads((GOLDEN / "summary.json").read_bytes())
    ledger, before = found["totals"]["ledger"], written["totals"]["ledger"]
    net = before.pop("net_seconds") - ledger["recall_seconds"]  # version 3 did not count these
    assert ledger.pop("net_seconds") == pytest.approx(net, abs=0.002)
    assert drop_added(found) == written


def drop_added(summary):
    """Remove from a summary the entries that later releases added."""
    if not isinstance(summary, dict):
        return summary
    return {key: drop_added(value) for key, value in summary.items() if key not in ADDED_TO_SUMMARY}


def test_every_decision_is_derived_again():
    app = typer.Typer()
    app.command()(check)
    answer = CliRunner().invoke(app, ["--run", str(GOLDEN)])
    assert answer.exit_code == 0, answer.output
    assert "derived 0 judged" not in answer.stdout
    assert "0 mismatches, 0 wrong counts, 0 changed files" in answer.stdout


def test_it_compacts_into_a_log_of_this_version_with_the_same_content(copied):
    with LogReader([copied]) as log:
        before = {name: log.recipe(name).to_pylist() for name in recipes()}
        rows = log.select("FROM decisions ORDER BY seq")
    compact(copied)
    assert json.loads((copied / MANIFEST).read_bytes())["schema_version"] == SCHEMA_VERSION
    with LogReader([copied]) as log:
        assert log.select("FROM decisions ORDER BY seq").equals(rows)
        after = {name: log.recipe(name).to_pylist() for name in recipes()}
    assert {name: round_values(of) for name, of in after.items()} == {
        name: round_values(of) for name, of in before.items()
    }


def round_values(rows):
    """Round all floats, because the last bit of a sum depends on the order of its terms."""
    return [{key: round(value, 9) if isinstance(value, float) else value for key, value in row.items()} for row in rows]


def test_an_unknown_version_is_refused(copied):
    content = json.loads((copied / MANIFEST).read_bytes())
    for version in (2, 11):
        (copied / MANIFEST).write_text(json.dumps(content | {"schema_version": version}))
        with pytest.raises(RunError, match=rf"version 3, 4, 5, 6, 7, 8, 9 or 10, got {version}"):
            read_manifest(copied)


ADDED = {
    "decisions": (
        *("parent", "context", "count", "chance"),
        *("target_raw_probability", "emitted_raw_probability", "target_raw_entropy"),
        *("drafter_raw_probability", "drafter_raw_entropy"),
    ),
    "blocks": ("candidates", "expected_tokens", "expected_seconds"),
    "versions": (
        "probe_tokens",
        "probe_greedy",
        "probe_sampled",
        "probe_forwards",
        "probe_seconds",
        "probe_plain_seconds",
    ),
}


def added_values(log: LogReader) -> set[tuple]:
    """Every combination of values in the columns that were added since version 4."""
    found = set()
    for table, names in ADDED.items():
        rows = log.select(f"SELECT DISTINCT {', '.join(names)} FROM {table}").to_pylist()
        found |= {(table, *row.values()) for row in rows}
    return found


@pytest.mark.parametrize("golden_log", [GOLDEN, VERSION_4])
def test_parts_of_earlier_versions_have_no_values_in_new_columns(golden_log):
    with LogReader([golden_log]) as log:
        assert added_values(log) == {
            ("decisions", *[None] * 9), ("blocks", 0, None, None), ("versions", *[None] * 6)
        }  # fmt: skip
        assert log.check().mismatches.num_rows == 0
        assert log.select("FROM decisions").num_rows > 50
    for table, parts in read_manifest(golden_log).tables.items():
        for part in parts:
            rows = to_current_schema(table, read_part(golden_log, part))
            assert rows.schema.equals(schema_of(table))
            assert rows.num_rows == part.rows


def test_a_log_of_version_4_compacts_into_one_of_this_version(tmp_path):
    copied = Path(shutil.copytree(VERSION_4, tmp_path / "run"))
    assert json.loads((copied / MANIFEST).read_bytes())["schema_version"] == 4
    with LogReader([copied]) as log:
        before = {table: log.select(f"FROM {table} ORDER BY seq") for table in TABLES if table not in COUNTS}
    compact(copied)
    (joined,) = read_manifest(copied).tables["decisions"]
    assert joined.schema_version == SCHEMA_VERSION
    with LogReader([copied]) as log:
        assert {table: log.select(f"FROM {table} ORDER BY seq") for table in before} == before


def test_parts_of_two_versions_are_read_as_one_table(tmp_path):
    """A run that was resumed after an upgrade has such parts."""
    copied = Path(shutil.copytree(VERSION_4, tmp_path / "run"))
    with LogReader([copied]) as log:
        before = log.select("SELECT count(*) AS n FROM decisions").to_pylist()[0]["n"]
    with RunLog(copied) as log:
        for event in make_tree(NODES, [0.4, 0.6], offset=1_000):
            log.append(event)
        log.append(block(offset=1_000, candidates=4, expected_tokens=2.5))
    versions = {table: [part.schema_version for part in parts] for table, parts in read_manifest(copied).tables.items()}
    assert versions["decisions"][-2:] == versions["blocks"][-2:] == [4, SCHEMA_VERSION]
    for finished in ("as written", "compacted"):
        with LogReader([copied]) as log:
            (row,) = log.select("SELECT count(*) AS n, count(parent) AS of_trees FROM decisions").to_pylist()
            assert (row["n"], row["of_trees"]) == (before + 5, 4), finished
            assert log.select("SELECT max(candidates) AS n, sum(candidates) AS sum FROM blocks").to_pylist() == [
                {"n": 4, "sum": 4}
            ]
            assert log.select("SELECT sum(decisions) AS n FROM counts_by_place").to_pylist() == [{"n": before + 5}]
            assert log.check().mismatches.num_rows == 0
            assert log.recipe("memory-calibration").num_rows
            assert "memory" in log.recipe("accepted-by-source")["source"].to_pylist()
        compact(copied, counted=1)
