"""`omnidraft replay` on the command line: refusals that leave no files, settings, interruption, the registry."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from replaying import Command, Typed, table_of
from tiny_pair import TinyPair, sentences, write_prompts

from pipeline.config.settings import load
from store.registry.registry import default_uri, find_only_model
from store.registry.version_folder import open_version, read_manifest

QUICK = ["--max-new-tokens", "8", "--device", "cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def assert_refused(typed: Typed, *words: str) -> None:
    """The command fails with an error message of ours, without a traceback and without output."""
    assert typed.status == 2
    assert typed.out == ""
    assert typed.err.removeprefix("loading models\n").startswith("omnidraft: ")
    assert "Traceback" not in typed.err
    for word in words:
        assert word in typed.err, typed.err


def test_a_target_that_does_not_fit_into_memory_is_refused(tiny_pair: TinyPair, omnidraft: Command, here: Path):
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1 << 42], "data_offsets": [0, 1 << 44]}}).encode()
    large = Path(shutil.copytree(tiny_pair.target, here / "large"))
    (large / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    typed = omnidraft("replay", str(tiny_pair.sums), "--target", "large", "--drafter", str(tiny_pair.drafter), *QUICK)
    assert_refused(typed, "'large' must fit into memory, but about 35184.4 GB are needed and", "smaller model")
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], ["nowhere.jsonl", "must be a file"]),
        (["builtin:dosc"], ["Did you mean 'builtin:docs'?"]),
        (["--set", "draft.mode=tree"], ["draft.mode", "'trie'", "'tree'"]),
        (["--temperature", "-1"], ["sampling.temperature", "-1.0"]),
        (["--set", "learn.rat=1"], ["Did you mean 'learn.rate'?"]),
        (["--set", "learn.rate"], ["KEY=VALUE"]),
        (["--config", "nowhere.toml"], ["nowhere.toml"]),
        (["--target", "builtin:target-9"], ["target-9", "target-7m"]),
        (["--drafter", "models:/nobody/1"], ["mlflow.db", "replay"]),
        (["--drafter", "models:/nobody"], ["models:/NAME/NUMBER"]),
    ],
)
def test_impossible_requests_are_refused_and_nothing_is_written(
    tiny_pair: TinyPair, omnidraft: Command, here: Path, arguments: list[str], words: list[str]
):
    source = [] if arguments[0].startswith(("nowhere", "builtin")) else [str(tiny_pair.sums)]
    assert_refused(omnidraft("replay", *source, *tiny_pair.options, *arguments), *words)
    assert [path for path in here.rglob("*") if path.is_file()] == []


def test_a_run_s_folder_must_be_new(tiny_pair: TinyPair, omnidraft: Command, here: Path):
    (here / "taken").mkdir()
    (here / "taken" / "notes.txt").write_text("mine")
    command = ["replay", tiny_pair.sums, *tiny_pair.options, "--run"]
    assert_refused(omnidraft(*command, "taken"), "new or empty folder", "taken", "--run")
    assert_refused(omnidraft(*command, "taken/notes.txt/run"), "is a file", "--run")
    assert [path.name for path in here.rglob("*")] == ["taken", "notes.txt"]


def test_settings_come_from_the_file_then_the_environment_then_the_command_line(
    tiny_pair: TinyPair, omnidraft: Command, here: Path, monkeypatch: pytest.MonkeyPatch
):
    (here / "run.toml").write_text(
        f"""
        targets = ["{tiny_pair.target}"]
        drafter = "{tiny_pair.drafter}"
        sources = ["{tiny_pair.more}"]
        batch = 3
        [sampling]
        max_new_tokens = 5
        [learn]
        rate = 0.1
        interval = 3
        """
    )
    for name, value in (("SOURCE_LIMIT", "2"), ("BATCH", "2"), ("DRAFT_MAX_DRAFT", "4"), ("RUN", "named")):
        monkeypatch.setenv(f"OMNIDRAFT_{name}", value)
    command = ["replay", tiny_pair.sums, "--config", "run.toml", "--max-draft", "1", "--set", "learn.rate=0.002"]
    typed = omnidraft(*command, "--no-publish", "--json", "-v")
    assert typed.status == 0, typed.err
    summary = json.loads(typed.out)
    assert (summary["totals"]["prompts"], summary["stopped"]) == (2, False)
    config = load(here / "named" / "config.json")
    assert (config.sources, config.batch, config.source.limit) == ((str(tiny_pair.sums),), 2, 2)
    assert (config.sampling.max_new_tokens, config.draft.max_draft) == (5, 1)
    assert (config.learn.rate, config.learn.interval, config.publish.enabled) == (0.002, 3, False)
    assert "packed forward" in typed.err, "a detail, which -v shows"


@pytest.fixture(scope="module")
def runs(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, `first`, whose versions went to a real MLflow store."""
    folder = tmp_path_factory.mktemp("published") / "runs"
    done = typed_in_a_process(
        [str(tiny_pair.sums), str(tiny_pair.more), *tiny_pair.options, *QUICK, "--run", str(folder / "first")],
        ["--set", "learn.interval=2", "--set", "publish.interval=8"],
        ["--set", "learn.spacing=fixed"],
    )
    output, errors = done.communicate(timeout=240)
    assert done.returncode == 0, errors
    assert "first" in output
    return folder


def typed_in_a_process(*arguments: list[str]) -> subprocess.Popen[str]:
    program = "from pipeline.cli.app import main; main()"
    return warm_python.Popen(
        [sys.executable, "-c", program, "replay", *(word for words in arguments for word in words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.representatives("4")
@pytest.mark.parametrize("number", [2, 4])
def test_a_run_starts_from_a_registered_version(runs: Path, tiny_pair: TinyPair, omnidraft: Command, number: int):
    """The baseline of the new run is that version: weights, head and n-grams are equal, byte for byte. The sums of what
    it was learned from stay behind: they are those of a correction of another drafter.
    """
    name = runs / f"from-{number}"
    typed = omnidraft(
        *["replay", tiny_pair.sums, "--target", tiny_pair.target, "--limit", "1", *QUICK, "--run", name],
        *["--drafter", f"models:/{find_only_model(default_uri(runs))}/{number}"],
    )
    assert typed.status == 0, typed.err
    parent = table_of(runs / "first", "versions").to_pylist()[number - 1]
    baseline = table_of(name, "versions").to_pylist()[0]
    assert baseline["reason"] == "baseline"
    folders = runs / "first" / "versions" / f"{number - 1:06d}", name / "versions" / "000000"
    old, new = (read_manifest(folder)["files"] for folder in folders)
    assert old.keys() == new.keys()
    assert {file for file in old if old[file] != new[file]} <= {"sums.safetensors"}
    assert (baseline["cache_entries"], baseline["cache_entries"] > 0) == (parent["cache_entries"], True)
    assert find_only_model(default_uri(runs)), "it continues the registered model of its pair"


@pytest.mark.slow
def test_ctrl_c_ends_a_run_and_keeps_the_completed_prompts(
    runs: Path, tiny_pair: TinyPair, omnidraft: Command, tmp_path: Path
):
    """The interrupt follows the first line of progress; the whole stream would take minutes."""
    endless = write_prompts(tmp_path / "endless.jsonl", sentences(0, 4000))
    running = typed_in_a_process(
        [str(endless), *tiny_pair.options, "--run", str(runs / "broken"), "--batch", "2", "--device", "cpu"]
    )
    assert running.stderr is not None
    lines = iter(running.stderr.readline, "")
    assert next(line for line in lines if "tokens/s" in line).startswith("1/4000 prompts")
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors
    assert "stopping" in errors
    assert "Traceback" not in errors
    assert "endless" in output, "the table of the completed prompts"
    summary = json.loads((runs / "broken" / "summary.json").read_text())
    assert 1 <= summary["totals"]["prompts"] == table_of(runs / "broken", "prompts").num_rows < 4000
    last = table_of(runs / "broken", "versions").to_pylist()[-1]
    assert open_version(runs / "broken" / last["folder"])["digest"] == last["digest"]
    assert omnidraft("check", "--run", runs / "broken").status == 0
    assert f"--resume {runs / 'broken'}" in errors
