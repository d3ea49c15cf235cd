"""`omnidraft study` over a tiny pair: what it runs, keeps, resumes and prints. Speeds are not checked."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from study_making import record
from tiny_pair import TinyPair, tiny_pair  # noqa: F401
from typer.testing import CliRunner, Result

from pipeline.cli.bench.study import study
from pipeline.config.settings import Config
from pipeline.reports.log_output import LogLevel, write_log
from pipeline.study import task as study_run
from pipeline.study.records import Key, Record
from pipeline.study.task import StudyTask, choose_prompts, run_task
from store.errors import ConfigError, OmnidraftError, RunError, SourceError, UsageError

app = typer.Typer()
app.command("study")(study)
app.command("other")(lambda: None)  # so that the first word is the command's name, as in the real command line


def run_study(pair: TinyPair, *arguments: object, publish: bool = False) -> Result:
    """Run `omnidraft study ...` on the tiny pair, one file per source, with quick settings."""
    fixed = ["--drafter", pair.drafter, "--set", "device=cpu", "--set", "learn.interval=2", "--max-new-tokens", 8]
    targets = [] if "--target" in arguments else ["--target", pair.target]
    name, *others = arguments
    words = ["study", name, *fixed, *targets, *others, pair.sums, pair.more, *([] if publish else ["--no-publish"])]
    line = [str(word) for word in words]
    with patch.object(sys, "argv", ["omnidraft", *line]), write_log(LogLevel.INFO, as_json=False):
        return CliRunner().invoke(app, line)


def runs_of(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    runs = json.loads(path.read_text())["runs"]
    return {(run["key"]["arm"], run["key"]["seed"]): run for run in runs}


def config_of(pair: TinyPair, **changes: Any) -> Config:
    fixed = {"targets": (str(pair.target),), "drafter": str(pair.drafter), "sources": (str(pair.sums), str(pair.more))}
    quick = {"device": "cpu", "sampling.max_new_tokens": 8, "learn.interval": 2}
    return Config().with_overrides(
        {**fixed, **quick, **{key.replace("__", "."): value for key, value in changes.items()}}
    )


@pytest.fixture(scope="module")
def losses(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:  # noqa: F811
    """The study of losses with three arms and two seeds."""
    folder = tmp_path_factory.mktemp("losses")
    arms = ("--arms", "none; hybrid; trie", "--seeds", 2)
    result = run_study(tiny_pair, "losses", *arms, "--out", folder / "kept.json", "--markdown", folder / "page.md")
    assert result.exit_code == 0, result.output
    return folder, result


@pytest.mark.slow
def test_every_arm_of_a_seed_sees_the_same_prompts_and_every_seed_others(losses: tuple[Path, Result]):
    runs = runs_of(losses[0] / "kept.json")
    assert set(runs) == {(arm, seed) for arm in ("none", "hybrid", "trie") for seed in (0, 1)}
    prompts = {seed: {run["prompts"] for (_, s), run in runs.items() if s == seed} for seed in (0, 1)}
    assert [len(found) for found in prompts.values()] == [1, 1]
    assert prompts[0] != prompts[1]


def test_arms_differ_in_what_they_are_named_after(losses: tuple[Path, Result]):
    runs = runs_of(losses[0] / "kept.json")
    assert runs["none", 0]["learning"] == 0 == runs["none", 0]["cache_entries"]
    assert runs["hybrid", 0]["learning"] > 0
    assert runs["hybrid", 0]["cache_entries"] > 0
    assert {run["segments"][-1] for run in runs.values()} == {20}
    for run in runs.values():
        counts = run["passed"]
        assert sorted(counts["offset"]) == list(range(20))
        assert sum(counts["emitted"]) > sum(counts["accepted"]) > 0
        assert counts["at"] == sorted(counts["at"])
        assert 0 < counts["at"][-1] <= run["seconds"]
        assert max(counts["drafted"]) <= 5 * max(counts["blocks"])


def test_arms_take_turns(losses: tuple[Path, Result]):
    lines = [line for line in losses[1].stderr.splitlines() if "last fifth" in line]
    assert [line.split(", ")[2].split(":")[0] for line in lines] == ["none", "hybrid", "trie", "hybrid", "trie", "none"]
    assert lines[0].startswith("1 of 6: ")
    assert " left" in lines[0]


def test_tables_are_printed_and_written(losses: tuple[Path, Result]):
    folder, result = losses
    for words in ("whole stream", "last fifth of the stream", "acceptance as a multiple of 'hybrid'", "± ", "Paper: "):
        assert words in result.stdout
    page = (folder / "page.md").read_text().replace(" \\\n       ", "")  # the command in one line
    assert page.startswith("## Study: losses, 20")
    assert "\n    omnidraft study losses --drafter " in page
    assert " --arms 'none; hybrid; trie' --seeds 2 " in page
    assert "page.md" not in page
    assert "20 prompts of " in page
    assert page.count("| arm | acceptance | tokens/forward |") == 2
    assert "| none | 1.00 ± 0.00 | +0.0% ± 0.0% | 1.00 | 1.00 | 1.00 | 1.00 |" in page


def test_metrics_are_in_the_file_for_other_readers(losses: tuple[Path, Result]):
    metrics = json.loads((losses[0] / "kept.json").read_text())["figures"]
    (arms,) = metrics.values()
    assert list(arms) == ["none", "hybrid", "trie"]
    assert arms["trie"]["last_fifth"]["acceptance"]["seeds"] == 2
    assert 0 < arms["trie"]["whole"]["acceptance"]["value"] <= 1


def test_an_interrupted_study_resumes_with_the_missing_runs(losses: tuple[Path, Result], tiny_pair: TinyPair):  # noqa: F811
    folder, _ = losses
    content = json.loads((folder / "kept.json").read_text())
    kept, lost = content["runs"][:3], content["runs"][3:]
    path = folder / "half.json"
    path.write_text(json.dumps({**content, "runs": kept}))
    result = run_study(tiny_pair, "losses", "--arms", "none; hybrid; trie", "--seeds", 2, "--out", path)
    assert result.exit_code == 0, result.output
    again = json.loads(path.read_text())["runs"]
    assert again[:3] == kept
    unchanged = ("key", "segments", "prompts", "cache_bytes")
    assert [{name: run[name] for name in unchanged} for run in again[3:]] == [
        {name: run[name] for name in unchanged} for run in lost
    ]
    assert [run["passed"]["accepted"] for run in again[3:]] == [run["passed"]["accepted"] for run in lost]
    assert result.stderr.count("last fifth") == 3


def test_a_finished_study_only_prints(losses: tuple[Path, Result], tiny_pair: TinyPair):  # noqa: F811
    folder, first = losses
    with patch.object(study_run, "run_task", side_effect=AssertionError):
        result = run_study(
            tiny_pair, "losses", "--arms", "none; hybrid; trie", "--seeds", 2, "--out", folder / "kept.json"
        )
        as_json = run_study(
            tiny_pair, "losses", "--arms", "none; hybrid; trie", "--seeds", 2, "--out", folder / "kept.json", "--json"
        )
    assert result.exit_code == 0, result.output
    assert result.stdout == first.stdout
    (arms,) = json.loads(as_json.stdout).values()
    assert list(arms) == ["none", "hybrid", "trie"]
    assert arms["trie"]["last_fifth"]["acceptance"]["seeds"] == 2


def test_other_settings_in_the_same_file_are_refused(losses: tuple[Path, Result], tiny_pair: TinyPair):  # noqa: F811
    result = run_study(tiny_pair, "losses", "--seeds", 2, "--out", losses[0] / "kept.json", "--batch", 3)
    assert isinstance(result.exception, RunError)
    assert "batch is 8 there, not 3" in str(result.exception)


def test_a_signal_keeps_the_finished_runs(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    done = []

    def until_the_second(task: StudyTask, passed: Any) -> Record:
        if done:
            raise KeyboardInterrupt
        done.append(task)
        return run_task(task, passed)

    with patch.object(study_run, "run_task", until_the_second):
        result = run_study(tiny_pair, "cache", "--quick", "--arms", "full; none", "--out", tmp_path / "kept.json")
    assert result.exit_code == 130
    assert "the same command resumes" in result.stderr
    assert list(runs_of(tmp_path / "kept.json")) == [("full", 0)]


def test_the_full_cache_comes_first_and_budgets_are_its_shares(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    given: dict[Key, Config] = {}

    def run_noted(task: StudyTask, passed: Any) -> Record:
        given[task.key] = task.config
        return record([1], target=task.key.target, arm=task.key.arm, seed=task.key.seed, cache_bytes=2051)

    with patch.object(study_run, "run_task", run_noted):
        result = run_study(tiny_pair, "cache", "--seeds", 3, "--out", tmp_path / "kept.json")
    assert result.exit_code == 0, result.output
    names = [key.arm for key in given]
    assert names[:6] == ["full", "none", "1/4 LRU", "1/4 LFU", "1/2 LRU", "1/2 LFU"]
    assert names[6:12] == ["none", "full", "1/4 LRU", "1/4 LFU", "1/2 LRU", "1/2 LFU"]  # full as early as it can be
    assert names[12:] == ["full", "1/4 LRU", "1/4 LFU", "1/2 LRU", "1/2 LFU", "none"]
    budgets = {key.arm: config.cache.budget_bytes for key, config in given.items()}
    assert (budgets["1/4 LRU"], budgets["1/4 LFU"], budgets["1/2 LRU"]) == (512, 512, 1025)
    policies = {key.arm: config.cache.policy for key, config in given.items()}
    assert list(policies.values()) == ["unbounded", "off", "lru", "lfu", "lru", "lfu"]


@pytest.mark.sweep
def test_caches_end_within_their_budgets(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    quick = ("--quick", "--limit", 3, "--arms", "full; none; 1/2 LFU", "--jobs", 2)
    result = run_study(tiny_pair, "cache", *quick, "--out", tmp_path / "kept.json")
    assert result.exit_code == 0, result.output
    size = {arm: run["cache_bytes"] for (arm, _), run in runs_of(tmp_path / "kept.json").items()}
    assert size["none"] == 0 <= size["1/2 LFU"] <= size["full"] / 2
    assert "size of the cache" in result.stdout


def test_the_head_is_studied_on_several_targets(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    targets = ("--target", tiny_pair.target, "--target", tiny_pair.drafter)
    arms = ("--arms", "fixed 2; fixed 5; cost, interleaved", "--limit", 4, "--quick")
    result = run_study(tiny_pair, "head", *arms, *targets, "--out", tmp_path / "kept.json")
    assert result.exit_code == 0, result.output
    assert f"target {tiny_pair.target}, drafter {tiny_pair.drafter}, two vocabularies" in result.stdout.replace(
        "\n", ""
    )
    assert f"target {tiny_pair.drafter}, drafter {tiny_pair.drafter}, one vocabulary" in result.stdout.replace("\n", "")
    assert result.stdout.count("Best fixed length by tokens/s over the whole stream, chosen afterwards: fixed ") == 2
    runs = json.loads((tmp_path / "kept.json").read_text())["runs"]
    same = [run for run in runs if run["same_vocabulary"]]
    assert {run["key"]["target"] for run in same} == {str(tiny_pair.drafter)}
    first = next(run for run in same if run["key"]["arm"] == "fixed 2")
    assert first["passed"]["accepted"] == first["passed"]["judged"]  # a drafter that is the target


def test_drift_is_studied_on_alternating_sources(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    arms = ("--arms", "page-hinkley, recall; no detector, no cache", "--alternate", 5, "--seeds", 1)
    result = run_study(tiny_pair, "drift", *arms, "--out", tmp_path / "kept.json")
    assert result.exit_code == 0, result.output
    assert {tuple(run["segments"]) for run in runs_of(tmp_path / "kept.json").values()} == {(0, 5, 10, 15, 20)}
    for words in ("acceptance around the first switch", "alarms and recovery", "3 over 1", "not stated (images)"):
        assert words in result.stdout


def test_runs_go_to_mlflow(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    arms = ("--arms", "none; hybrid", "--quick", "--limit", 2, "--mlflow-uri", uri)
    result = run_study(tiny_pair, "losses", *arms, "--out", tmp_path / "kept.json", publish=True)
    assert result.exit_code == 0, result.output
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("omnidraft-studies")
    assert experiment is not None
    found = {run.data.tags["arm"]: run for run in client.search_runs([experiment.experiment_id])}
    assert set(found) == {"none", "hybrid"}
    for arm, run in found.items():
        assert run.data.tags["study"] == "losses"
        assert run.info.status == "FINISHED"
        counts = runs_of(tmp_path / "kept.json")[arm, 0]["passed"]
        rate = sum(counts["accepted"]) / sum(counts["judged"])
        assert run.data.metrics["final/whole/acceptance"] == rate
        assert len(client.get_metric_history(run.info.run_id, "curve/acceptance_rate")) == 4
    assert not (tmp_path / "kept.json-unsent").exists()


def test_runs_that_mlflow_does_not_accept_are_sent_the_next_time(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    arms = ("--arms", "none", "--quick", "--limit", 2, "--out", tmp_path / "kept.json")
    (tmp_path / "blocked").write_text("")
    with patch("pipeline.study.mlflow.TIMEOUT", 2.0):
        result = run_study(tiny_pair, "losses", *arms, "--mlflow-uri", f"sqlite:///{tmp_path}/blocked/db", publish=True)
    assert result.exit_code == 0, result.output
    assert "MLflow did not accept this run" in result.stderr
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    result = run_study(tiny_pair, "losses", *arms, "--mlflow-uri", uri, publish=True)
    from mlflow import MlflowClient

    experiment = MlflowClient(tracking_uri=uri).get_experiment_by_name("omnidraft-studies")
    assert experiment is not None
    assert len(MlflowClient(tracking_uri=uri).search_runs([experiment.experiment_id])) == 1
    assert not (tmp_path / "kept.json-unsent").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("losses", "--arms", "tree"), UsageError, "got 'tree'; did you mean 'trie'?"),
        (("losses", "--set", "learn.loss=trie"), ConfigError, "decided by the arms"),
        (("losses", "--set", "learn.rat=1"), ConfigError, "Did you mean 'learn.rate'"),
        (("losses", "--target", "a", "--target", "b", "--set", "swaps=['5=a']"), ConfigError, "begins with one target"),
        (("losses", "--alternate", 5), ConfigError, "belong to the study 'drift'"),
        (("cache", "--arms", "1/4 LFU"), ConfigError, "need the arm 'full'"),
        (("drift", "third.jsonl"), ConfigError, "needs two sources, got 3"),
        (("drift", "--alternate", 6), SourceError, "2 segments of 6 prompts, got 10 prompts"),
        (("losses", "-"), SourceError, "standard input cannot be one"),
        (("losses", "--markdown", "nowhere/page.md"), UsageError, "--markdown must name a file"),
        (("losses", "--where", "split=none"), OmnidraftError, "split"),
    ],
)
def test_mistakes_are_reported(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    arguments: tuple[object, ...],
    error: type[OmnidraftError],
    message: str,
):
    result = run_study(tiny_pair, *arguments, "--out", tmp_path / "kept.json")
    assert isinstance(result.exception, error), result.output
    assert message in str(result.exception)


def test_prompts_are_chosen_by_the_seed_alone(tiny_pair: TinyPair):  # noqa: F811
    first, again = (choose_prompts(config_of(tiny_pair, source__limit=4), None) for _ in range(2))
    other = choose_prompts(config_of(tiny_pair, source__limit=4, seed=1), None)
    assert first == again
    assert [prompt.offset for prompt in first.chosen] == list(range(8))
    assert [prompt.dataset for prompt in first.chosen] == ["sums"] * 4 + ["more"] * 4
    assert first.segments == (0, 4, 8)
    assert {prompt.text for prompt in first.chosen} != {prompt.text for prompt in other.chosen}
    whole = choose_prompts(config_of(tiny_pair, seed=1), None)
    assert whole.chosen[:4] == other.chosen[:4]  # a smaller limit takes the same first prompts
    assert len(whole.chosen) == 20


def test_segments_alternate_without_repeating_a_prompt(tiny_pair: TinyPair):  # noqa: F811
    found = choose_prompts(config_of(tiny_pair), 3)
    assert [prompt.dataset for prompt in found.chosen] == ["sums"] * 3 + ["more"] * 3 + ["sums"] * 3 + ["more"] * 3
    assert found.segments == (0, 3, 6, 9, 12)
    assert len({prompt.prompt_id + prompt.dataset for prompt in found.chosen}) == 12


def test_rows_that_are_no_prompts_are_counted(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Ann has"}\n{"prompt": 3}\n')
    config = config_of(tiny_pair, sources=(str(tmp_path / "rows.jsonl"),))
    assert choose_prompts(config, None).rejected == 1
    (tmp_path / "rows.jsonl").write_text('{"prompt": 3}\n')
    with pytest.raises(SourceError, match="A study needs prompts"):
        choose_prompts(config, None)
