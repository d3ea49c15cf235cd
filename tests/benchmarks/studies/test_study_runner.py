"""Studies over a tiny pair: what they run, keep and resume. Speeds are not checked."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from study_making import record
from tiny_pair import TinyPair
from typer.testing import CliRunner, Result

from benchmarks.studies import task as study_run
from benchmarks.studies.command import study
from benchmarks.studies.records import Key, Record
from benchmarks.studies.task import StudyTask, choose_prompts
from pipeline.config.settings import Config
from pipeline.reports.log_output import LogLevel, write_log

app = typer.Typer()
app.command("study")(study)
app.command("other")(lambda: None)  # so that the first word is the command's name, as in the real command line


def run_study(pair: TinyPair, *arguments: object) -> Result:
    """Run a study on the tiny pair, one file per source, with quick settings."""
    fixed = ["--drafter", pair.drafter, "--set", "device=cpu", "--set", "learn.interval=2", "--max-new-tokens", 8]
    targets = [] if "--target" in arguments else ["--target", pair.target]
    name, *others = arguments
    words = ["study", name, *fixed, *targets, *others, pair.sums, pair.more]
    line = [str(word) for word in words]
    with patch.object(sys, "argv", ["studies", *line]), write_log(LogLevel.INFO, as_json=False):
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
def losses(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The study of losses with three arms and two seeds."""
    folder = tmp_path_factory.mktemp("losses")
    arms = ("--arms", "none; hybrid; trie", "--seeds", 2)
    result = run_study(tiny_pair, "losses", *arms, "--out", folder / "kept.json")
    assert result.exit_code == 0, result.output
    return folder, result


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


def test_an_interrupted_study_resumes_with_the_missing_runs(losses: tuple[Path, Result], tiny_pair: TinyPair):
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


def test_the_full_cache_comes_first_and_budgets_are_its_shares(tiny_pair: TinyPair, tmp_path: Path):
    given: dict[Key, Config] = {}

    def run_noted(task: StudyTask) -> Record:
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


def test_prompts_are_chosen_by_the_seed_alone(tiny_pair: TinyPair):
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


def test_segments_alternate_without_repeating_a_prompt(tiny_pair: TinyPair):
    found = choose_prompts(config_of(tiny_pair), 3)
    assert [prompt.dataset for prompt in found.chosen] == ["sums"] * 3 + ["more"] * 3 + ["sums"] * 3 + ["more"] * 3
    assert found.segments == (0, 3, 6, 9, 12)
    assert len({prompt.prompt_id + prompt.dataset for prompt in found.chosen}) == 12
