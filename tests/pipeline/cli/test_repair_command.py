"""`omnidraft repair` on the command line, and what `omnidraft check` compares."""

import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from synthetic_runs import small_run_events, write_run
from typer.testing import CliRunner

from pipeline.cli.log import check, repair, sql
from pipeline.reports.log_output import LogLevel, write_log
from store.errors import RunError
from store.log.manifest import MANIFEST, PREVIOUS

app = typer.Typer()
for command in (sql, check, repair):
    app.command()(command)


def call(*arguments: object) -> Result:
    with write_log(LogLevel.INFO, as_json=False):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "one", small_run_events())


def test_a_sound_run_is_left_alone(run: Path):
    before = (run / MANIFEST).read_bytes()
    answer = call("repair", run)
    assert (answer.exit_code, answer.stdout) == (0, f"{run}: sound, 15 prompts, finished\n")
    (report,) = json.loads(call("repair", run, "--json").stdout)
    assert report == {"folder": str(run), "kind": "sound", "prompts": 15, "finished": True}
    assert (run / MANIFEST).read_bytes() == before


def test_a_run_that_is_repaired_is_checked_and_queried(run: Path):
    counted = call("sql", "SELECT count(*) FROM decisions", "--run", run, "--format", "csv").stdout
    for name in (MANIFEST, PREVIOUS):
        (run / name).unlink(missing_ok=True)
    assert call("check", "--run", run).exit_code == 1
    answer = call("repair", run)
    assert answer.exit_code == 0, answer.output
    assert f"{run}: rebuilt, 15 prompts, finished\n" in answer.stdout
    assert "now run `omnidraft check`" in answer.stdout
    assert f"{run}: decisions: 1 parts with 75 rows have no recorded digest" in answer.output.replace("\n", " ")
    assert call("check", "--run", run).exit_code == 0
    assert call("sql", "SELECT count(*) FROM decisions", "--run", run, "--format", "csv").stdout == counted


def test_a_run_on_an_object_store_is_not_repaired():
    answer = call("repair", "s3://bucket/run")
    assert isinstance(answer.exception, RunError)
    assert "must be in a folder" in str(answer.exception)


def test_check_counts_rows_that_differ_from_the_manifest(run: Path):
    content = json.loads((run / MANIFEST).read_bytes())
    content["tables"]["prompts"][0]["rows"] = 1
    (run / MANIFEST).write_text(json.dumps(content))
    answer = call("check", "--run", run)
    assert answer.exit_code == 1
    assert "0 mismatches, 0 wrong counts, 1 changed file" in answer.stdout
    assert "but its manifest has 1 with" in answer.output.replace("\n", " ")
