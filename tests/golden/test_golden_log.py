"""A log that version 3 wrote, before there were checkpoints, counts and rounding, is read as it was."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli.log import check
from store.errors import RunError
from store.log.compaction import compact
from store.log.manifest import MANIFEST, read_manifest
from store.log.rollups import COUNTS
from store.query.log_reader import VIEWS, LogReader, recipes
from store.query.summary import summarize

GOLDEN = Path(__file__).parent / "log-v3"
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
    """The same log where it may be written to."""
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


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_runs_and_has_something_to_say(name):
    with LogReader([GOLDEN]) as log:
        assert (log.recipe(name).num_rows == 0) == (name in ("check", "ngrams-that-pay"))


def test_the_summary_is_the_one_that_version_3_wrote():
    assert summarize(GOLDEN) == json.loads((GOLDEN / "summary.json").read_bytes())


def test_every_decision_is_derived_again():
    app = typer.Typer()
    app.command()(check)
    answer = CliRunner().invoke(app, ["--run", str(GOLDEN)])
    assert answer.exit_code == 0, answer.output
    assert "derived 0 judged" not in answer.stdout
    assert "0 mismatches, 0 wrong counts, 0 changed files" in answer.stdout


def test_it_is_read_beside_a_log_of_this_version_and_compacts_into_one(copied):
    with LogReader([copied]) as log:
        before = {name: log.recipe(name).to_pylist() for name in recipes()}
        rows = log.select("FROM decisions ORDER BY seq")
    compact(copied)
    assert json.loads((copied / MANIFEST).read_bytes())["schema_version"] == 4
    with LogReader([copied]) as log:
        assert log.select("FROM decisions ORDER BY seq").equals(rows)
        after = {name: log.recipe(name).to_pylist() for name in recipes()}
    assert {name: round_values(of) for name, of in after.items()} == {
        name: round_values(of) for name, of in before.items()
    }


def round_values(rows):
    """Sums of floats depend on their order in the last bit."""
    return [{key: round(value, 9) if isinstance(value, float) else value for key, value in row.items()} for row in rows]


def test_a_version_that_is_not_known_is_refused_with_a_word(copied):
    content = json.loads((copied / MANIFEST).read_bytes())
    for version in (2, 5):
        (copied / MANIFEST).write_text(json.dumps(content | {"schema_version": version}))
        with pytest.raises(RunError, match=rf"version 3 or 4, got {version}"):
            read_manifest(copied)
