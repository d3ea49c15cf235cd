"""`omnidraft plan` and `omnidraft bench-plan`: their output, inputs measured from a run, the cost of late weights."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import Result
from event_making import make_completed
from replaying import config_of, run_replay
from tiny_pair import TinyPair, tiny_pair
from typer import Typer
from typer.testing import CliRunner

from pipeline.bench.capacity.inputs import CapacityInputs, inputs_of_run
from pipeline.bench.capacity.measure import WINDOW, registry_costs, windows_of
from pipeline.cli.bench.capacity import bench_plan, plan
from pipeline.config.settings import Config
from pipeline.learner_service.client import QUEUE_LIMIT
from pipeline.run.folder import SPOOL
from store.errors import RunError, UsageError
from store.log.manifest import read_manifest
from store.log.run_log import RunLog

__all__ = ["tiny_pair"]  # a fixture


def run(*arguments: object) -> Result:
    app = Typer()
    app.command()(plan)
    app.command()(bench_plan)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_plan(*arguments: object) -> dict[str, Any]:
    done = run("plan", "--json", *arguments)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_a_plan_ends_with_one_sentence_that_names_the_first_bottleneck():
    done = run("plan", "--prompts-per-day", "1e6", "--workers", 1000)
    assert done.exit_code == 0
    assert "1,000,000 prompts a day, 1,000 workers" in done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith("First bottleneck")
    assert f": {run_plan('--workers', 1000)['first bottleneck']} (" in last


def test_without_a_number_of_workers_the_plan_has_as_many_as_needed():
    found = run_plan("--prompts-per-day", 86_400 * 10, "--figure", "worker_prompts=3")
    assert found["cluster"]["workers"] == 4
    assert next(load["share"] for load in found["loads"] if load["name"] == "decoding") == pytest.approx(10 / 12)


def test_intervals_are_those_of_the_settings_and_the_queue_is_the_learner_s():
    cluster, settings = run_plan()["cluster"], Config()
    assert cluster["update_interval"] == CapacityInputs().update_examples == settings.learn.interval
    assert cluster["publish_interval"] == settings.publish.interval
    assert cluster["waiting"] == QUEUE_LIMIT


def test_every_input_is_printed_with_its_source():
    found = run_plan()
    assert found["figures"].keys() == found["sources"].keys()
    assert found["figures"]["worker_prompts"] == CapacityInputs().worker_prompts


@pytest.mark.parametrize("given", ["worker_prompts=often", "curve=1", "no_such=1", "points=-1"])
def test_an_invalid_input_is_an_error(given: str):
    with pytest.raises(UsageError, match="--figure must be NAME=NUMBER"):
        _raise(run("plan", "--figure", given))


def _raise(done: Result) -> None:
    assert done.exception
    raise done.exception


def test_a_larger_drafter_is_planned_for():
    assert run_plan("--drafter-parameters", "68e6")["a day"]["versions, bytes"] > run_plan()["a day"]["versions, bytes"]


def test_bytes_and_pace_are_measured_from_a_run(tiny_pair: TinyPair, tmp_path: Path):
    folder = tmp_path / "run"
    run_replay(config_of(tiny_pair, source__limit=3), folder)
    parts = [part for parts in read_manifest(folder).tables.values() for part in parts]
    found = run_plan("--run", folder)["figures"]
    prompts = sum(part.rows for part in read_manifest(folder).tables["prompts"])
    in_all = found["log_bytes"] * prompts + found["part_bytes"] * len(parts)
    assert in_all == pytest.approx(sum(part.bytes for part in parts))
    assert found["manifest_bytes"] * len(parts) == pytest.approx((folder / "log" / "manifest.json").stat().st_size)
    assert found["worker_prompts"] > 0
    assert found["drafter_parameters"] == CapacityInputs().drafter_parameters  # the run has no versions


def test_sizes_are_measured_from_the_newest_version_of_a_run(tiny_pair: TinyPair, tmp_path: Path):
    folder = tmp_path / "run"
    run_replay(config_of(tiny_pair, source__limit=1), folder)
    for number, size in ((0, 400), (1, 8000)):
        version = folder / "versions" / f"{number:06d}"
        version.mkdir(parents=True)
        (version / "model.safetensors").write_bytes(bytes(size))
        (version / "head.safetensors").write_bytes(bytes(100))
    found = inputs_of_run(folder, CapacityInputs())
    assert (found["drafter_parameters"], found["version_bytes"]) == (2000, 100)


def test_a_run_without_prompts_is_refused(tmp_path: Path):
    with RunLog(tmp_path / "run"):
        pass
    with pytest.raises(RunError, match="must hold completed prompts"):
        inputs_of_run(tmp_path / "run", CapacityInputs())


def test_windows_count_from_each_source_s_first_prompt():
    prompts = [make_completed(offset, dataset="a" if offset < WINDOW + 1 else "b") for offset in range(WINDOW + 3)]
    found = [(window.dataset, window.first, window.judged, window.accepted) for window in windows_of(reversed(prompts))]
    assert found == [("a", 0, 20 * WINDOW, 10 * WINDOW), ("a", WINDOW, 20, 10), ("b", 0, 40, 20)]


def run_bench_plan(pair: TinyPair, file: Path, *arguments: object) -> list[dict[str, Any]]:
    models = "--target", pair.target, "--drafter", pair.drafter, "--set", "device=cpu"
    quick = "--max-new-tokens", 8, "--set", "learn.interval=2", "--set", "learn.rate=0.01", "--json", file
    done = run("bench-plan", pair.sums, *models, *quick, *arguments)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def test_weights_that_arrive_after_the_stream_change_nothing(tiny_pair: TinyPair, tmp_path: Path):
    late, never = run_bench_plan(tiny_pair, tmp_path / "found.json", "--limit", 6, "--delays", "99, never")
    assert (late["delay"], never["delay"]) == (99, None)
    assert late["windows"] == never["windows"]
    assert late["costs"]["made"] == never["costs"]["made"] == 3  # the learner still makes them
    assert late["costs"]["prompts"] == 6


def test_weights_in_time_change_what_is_drafted(tiny_pair: TinyPair, tmp_path: Path):
    soon, never = run_bench_plan(
        tiny_pair, tmp_path / "found.json", "--limit", 6, "--delays", "0,never", "--set", "batch=1"
    )
    assert soon["windows"] != never["windows"]
    assert soon["costs"]["weights_bytes"] > 0


class CountingSender:
    """Records messages in place of MLflow's sender."""

    delivered: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __init__(self, *arguments: object) -> None:
        self.delivered.clear()

    def deliver(self, kind: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
        self.delivered += [(kind, body) for body in bodies]
        return {}


def spool_of(folder: Path, *messages: tuple[str, dict[str, Any]]) -> Path:
    folder.mkdir()
    lines = [{"id": number, "kind": kind, "body": body} for number, (kind, body) in enumerate(messages)]
    lines.append({"ids": [0], "outcome": "delivered", "result": {}})
    (folder / SPOOL).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_messages_of_a_run_are_sent_again_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("store.registry.mlflow_sender.Sender", CountingSender)
    points = {"points": [["a", 1.0, 0, 9], ["b", 2.0, 0, 9], ["a", 1.5, 1, 9]]}
    folder = spool_of(tmp_path / "run", ("start", {}), ("points", points), ("publish", {"v": 0}), ("finish", {}))
    assert registry_costs(folder)["points"] == 1.5
    assert CountingSender.delivered == [("start", {}), ("points", points), ("publish", {"v": 0})]


def test_a_run_that_published_nothing_has_no_registry_costs(tmp_path: Path):
    with pytest.raises(RunError, match="must hold versions that were sent to MLflow"):
        _raise(run("bench-plan", "--registry-of", spool_of(tmp_path / "run", ("start", {}))))


def test_a_delay_that_is_no_number_is_an_error():
    with pytest.raises(UsageError, match="--delays must be comma-separated numbers"):
        _raise(run("bench-plan", "--delays", "soon"))
