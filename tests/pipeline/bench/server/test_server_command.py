"""`omnidraft bench-serve` as a command, and the plot that it draws."""

import json
from pathlib import Path

import pytest
import typer
from serving_doubles import MODEL, ScriptedEngine, run_http_server
from typer.testing import CliRunner, Result

from dashboards.load import panels_of, read_samples
from pipeline.bench.server.client import LoadOutcomes
from pipeline.bench.server.learning_cost import OFF, ArmRound, LearningCost, ratios
from pipeline.bench.server.report import comparison_markdown, markdown
from pipeline.bench.server.results import summarize_clients
from pipeline.bench.server.verify import Difference, Verification
from pipeline.cli.bench.server import bench_serve
from store.errors import CorruptError, RunError, UsageError


def command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench_serve)
    return CliRunner().invoke(app, arguments)


@pytest.mark.slow
def test_a_running_server_is_loaded_and_everything_written(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a first text"}\n{"prompt": "another text"}\n', encoding="utf-8")
    files = {kind: tmp_path / f"load.{kind}" for kind in ("json", "markdown", "png")}
    with run_http_server(ScriptedEngine()) as server:
        shape = ("--clients", "3", "--seconds", "2", "--warm-up", "0", "--max-tokens", "4,8")
        places = ("--json", str(files["json"]), "--markdown", str(files["markdown"]), "--picture", str(files["png"]))
        done = command(str(prompts), "--url", server.url, *shape, *places)
    assert done.exit_code == 0, done.output
    found = json.loads(files["json"].read_bytes())
    assert found["model"] == MODEL
    assert found["clients"]["requests"] > 0
    assert found["clients"]["errors"] == {}
    assert found["verified"] is None  # its target is unknown
    assert found["samples"][-1]["figures"]["generated"] > 0
    assert files["markdown"].read_text(encoding="utf-8") in done.output + "\n"
    assert files["png"].stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://127.0.0.1:9", "--compare-learning"), "started here"),
        (("--url", "http://127.0.0.1:9", "--run", "there"), "started here"),
        (("--url", "http://127.0.0.1:9", "--verify"), "--target"),
        (("--max-tokens", "4,0"), "above 0"),
        (("--max-tokens", "many"), "above 0"),
        (("--picture", "load.txt"), ".png"),
    ],
)
def test_impossible_options_are_refused(arguments: tuple[str, ...], message: str):
    done = command(*arguments)
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


def test_files_must_have_a_folder(tmp_path: Path):
    done = command("--json", str(tmp_path / "none" / "load.json"))
    assert isinstance(done.exception, RunError)


def sample(at: float, **metrics: float) -> dict:
    return {"at": at, "figures": metrics, "memory": 2_000_000}


def test_a_plot_has_the_metrics_of_the_server(tmp_path: Path):
    samples = [sample(2.0 * step, proposed=4.0 * step, accepted=3.0 * step, waiting=step) for step in range(3)]
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"samples": samples}), encoding="utf-8")
    panels = panels_of(read_samples(file))
    assert set(panels) == {"acceptance", "resident memory, MB", "waiting"}
    assert panels["acceptance"] == {"accepted / proposed, with lookups": [(1.0, 0.75), (3.0, 0.75)]}
    assert panels["waiting"] == {"requests": [(0.0, 0), (2.0, 1), (4.0, 2)]}
    assert panels["resident memory, MB"]["memory"] == [(0.0, 2.0), (2.0, 2.0), (4.0, 2.0)]


@pytest.mark.parametrize(
    ("text", "error"), [("{}", CorruptError), ("no json", CorruptError), ('{"samples": []}', RunError)]
)
def test_a_plot_needs_the_file_of_a_load(tmp_path: Path, text: str, error: type[Exception]):
    file = tmp_path / "load.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(error):
        read_samples(file)


MACHINE = {"cores": 2, "processor": "p", "load": 0.5}


def test_differences_are_reported_with_their_margins():
    from pipeline.bench.server.benchmark import LoadResult, report_of
    from pipeline.bench.server.server import Sample

    differing = [Difference(3, "begin", 5, " one", " two", 1e-6), Difference(4, "begin", 0, " a", "", 0.5)]
    loaded = LoadResult("model", LoadOutcomes(0.0, 1.0, []), [Sample(0.0), Sample(1.0)])
    text = markdown(report_of(loaded, MACHINE, 1, Verification(9, 2, 50, differing)))
    assert "2 differ, 1 of them at near ties" in text
    assert "- request 3, token 5: ' one' expected, got ' two'; margin 1e-06" in text


def test_a_comparison_is_reported_by_arm():
    rounds = {name: [ArmRound(summarize_clients(LoadOutcomes(0.0, 1.0, [])), 2.0, 3.0)] * 2 for name in (OFF, "live")}
    text = comparison_markdown(LearningCost(1.5, rounds, ratios(rounds)), MACHINE, "model")
    assert "| live | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 2 | 3 | 0 |" in text
    assert "required 1.25 | live |" in text


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.reports.terminal.find_spec", lambda name: None if name == "psutil" else name)
    done = command("--url", "http://127.0.0.1:9")
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == (
        "omnidraft bench-serve needs aiohttp and psutil, but psutil cannot be found. "
        'Try: pip install "omnidraft[bench]"'
    )
