"""`omnidraft bench-store` on a small run: its measurements add up, and it leaves no files."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pipeline.bench.storage import benchmark as bench
from pipeline.bench.storage.benchmark import RECIPES, measure, measure_joining, measure_sizes, measure_writing
from pipeline.cli.app import main
from pipeline.cli.bench.parts import bench_store
from store.errors import RunError
from store.log.run_log import RunLog
from store.query.log_reader import recipes

GOLDEN = Path(__file__).parents[3] / "golden" / "log-v3"  # a real run


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(bench, "APPENDED_ROWS", 2000)
    monkeypatch.setattr(bench, "SMALL_PARTS", 200)


def test_the_recipes_that_are_timed_are_recipes():
    assert recipes().keys() >= set(RECIPES)


@pytest.mark.slow
def test_the_command_prints_and_writes_all_results_and_leaves_no_files(tmp_path):
    app = typer.Typer()
    app.command()(bench_store)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    files = {"--markdown": tmp_path / "bench.md", "--json": tmp_path / "bench.json", "--scratch": scratch}
    arguments = [
        "--run",
        GOLDEN,
        "--rows",
        2000,
        "--repetitions",
        2,
        *(word for pair in files.items() for word in pair),
    ]
    answer = CliRunner().invoke(app, list(map(str, arguments)))
    assert answer.exit_code == 0, answer.output
    assert files["--markdown"].read_text() == answer.stdout
    for words in ("| log-v3 |", "| uniform |", "**together**", *(f"| {name} |" for name in RECIPES), "peak memory"):
        assert words in answer.stdout
    report = json.loads(files["--json"].read_text())
    assert list(report["large"]["answers"]["recipes"]) == list(RECIPES)
    assert {len(seconds) for seconds in report["large"]["answers"]["recipes"].values()} == {2}
    assert 2000 <= report["large"]["decisions"] < 2200
    assert report["large"]["answers"]["peak_bytes"] > 10_000_000
    assert list(scratch.iterdir()) == []


def test_bytes_by_column_are_of_the_log_as_written_and_joined_and_the_run_stays_as_it_is(tmp_path):
    before = {path: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}
    found = measure_sizes(GOLDEN, tmp_path)
    assert {path: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()} == before
    assert (found.rows, found.parts, found.counts) == (597, 2, 0)
    assert sum(found.written.values()) == pytest.approx((12229 + 12373) / 597)
    assert 0 < sum(found.joined.values()) < sum(found.written.values())


def test_every_run_is_written_as_often_as_requested(tmp_path):
    found = measure_writing([GOLDEN], tmp_path, 3)
    assert [len(found["log-v3"].per_second), len(found["log-v3"].per_cpu_second)] == [3, 3]
    assert min(found["log-v3"].per_cpu_second) > 0
    assert list(tmp_path.iterdir()) == []


def test_queries_are_timed_before_and_after_joining(tmp_path):
    found = measure_joining(GOLDEN, tmp_path, 1000, 1)
    assert (found.parts_before, found.parts_after) == (15, 3)
    assert found.bytes_after < found.bytes_before
    assert found.before.recipes.keys() == found.after.recipes.keys() == set(RECIPES)


def test_a_place_that_does_not_exist_is_refused_before_anything_is_measured(tmp_path):
    app = typer.Typer()
    app.command()(bench_store)
    answer = CliRunner().invoke(app, ["--json", str(tmp_path / "nowhere" / "x.json")])
    assert "must be in a folder that exists" in str(answer.exception)


def test_a_scratch_folder_that_does_not_exist_is_refused(tmp_path):
    app = typer.Typer()
    app.command()(bench_store)
    answer = CliRunner().invoke(app, ["--run", str(GOLDEN), "--scratch", str(tmp_path / "nowhere")])
    assert isinstance(answer.exception, RunError)
    assert "--scratch must be an existing folder" in str(answer.exception)


def test_a_run_without_decisions_cannot_be_measured(tmp_path):
    RunLog(tmp_path / "empty").finish()
    with pytest.raises(RunError, match=r"empty must have decisions.*--run"):
        measure([GOLDEN, tmp_path / "empty"], tmp_path, 2000, 1)


def test_runs_of_one_name_are_not_mixed_up(tmp_path):
    copy = shutil.copytree(GOLDEN, tmp_path / GOLDEN.name)
    with pytest.raises(RunError, match="different folder names"):
        measure([GOLDEN, copy], tmp_path, 2000, 1)


@pytest.mark.parametrize("what", ["scale", "store", "translate"])
def test_the_benchmarks_may_be_named_by_two_words(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["omnidraft", "bench", what, "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert f"bench-{what} [OPTIONS]" in capsys.readouterr().out
