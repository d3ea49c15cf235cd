"""`omnidraft replay` on the command line: refusals that leave no files, settings, interruption, the registry."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from replaying import Command, Typed, omnidraft, table_of  # noqa: F401  (a fixture)
from tiny_pair import TinyPair, sentences, tiny_pair, write_prompts  # noqa: F401  (a fixture)

from pipeline.cli.runs import list_next_commands
from pipeline.config.settings import load
from pipeline.reports.progress import PlainDisplay
from store.events import Event, PromptCompleted
from store.registry.registry import default_uri, find_only_model
from store.registry.version_folder import open_version

QUICK = ["--max-new-tokens", "8", "--device", "cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def without_tokenizer(pair: TinyPair, folder: Path) -> Path:
    """Copy a target without its tokenizer."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(pair.target / name, folder)
    return folder


def without_bytes(pair: TinyPair, folder: Path) -> Path:
    """Copy a drafter without the byte tokens of its tokenizer, which then knows only the characters that it learned."""
    shutil.copytree(pair.drafter, folder)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    words = state["model"]["vocab"]
    state["model"]["vocab"] = {
        (f"lost-{word}" if word.startswith("<0x") else word): number for word, number in words.items()
    }
    state["model"]["byte_fallback"] = False
    path.write_text(json.dumps(state), encoding="utf-8")
    return folder


def assert_refused(typed: Typed, *words: str) -> None:
    """The command fails with an error message of ours, without a traceback and without output."""
    assert typed.status == 2
    assert typed.out == ""
    assert typed.err.removeprefix("loading models\n").startswith("omnidraft: ")
    assert "Traceback" not in typed.err
    for word in words:
        assert word in typed.err, typed.err


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
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
    arguments: list[str],
    words: list[str],
):
    source = [] if arguments[0].startswith(("nowhere", "builtin")) else [str(tiny_pair.sums)]
    assert_refused(omnidraft("replay", *source, *tiny_pair.options, *arguments), *words)
    assert [path for path in here.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("option", [["--colour", "red"], ["--temperature", "hot"]])
def test_an_option_that_cannot_be_read_is_refused(omnidraft: Command, here: Path, option: list[str]):  # noqa: F811
    typed = omnidraft("replay", *option)
    assert typed.status == 2
    assert option[0] in typed.err
    assert list(here.iterdir()) == []


def test_a_target_without_a_tokenizer_is_refused(
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
    tmp_path: Path,
):
    bare = without_tokenizer(tiny_pair, tmp_path / "bare")
    assert_refused(omnidraft("replay", tiny_pair.sums, "--target", bare), "a tokenizer must load", "bare")
    assert list(here.iterdir()) == []


def test_a_drafter_that_cannot_spell_the_target_is_refused(
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
    tmp_path: Path,
):
    mute = without_bytes(tiny_pair, tmp_path / "mute")
    typed = omnidraft("replay", tiny_pair.sums, "--target", tiny_pair.target, "--drafter", mute)
    assert_refused(typed, "must be able to spell the target's bytes", "byte-fallback")
    assert list(here.iterdir()) == []


def test_a_run_s_folder_must_be_new(
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
):
    (here / "taken").mkdir()
    (here / "taken" / "notes.txt").write_text("mine")
    command = ["replay", tiny_pair.sums, *tiny_pair.options, "--run"]
    assert_refused(omnidraft(*command, "taken"), "new or empty folder", "taken", "--run")
    assert_refused(omnidraft(*command, "taken/notes.txt/run"), "is a file", "--run")
    assert [path.name for path in here.rglob("*")] == ["taken", "notes.txt"]


def test_settings_come_from_the_file_and_the_command_line_takes_precedence(
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
):
    (here / "run.toml").write_text(
        f"""
        targets = ["{tiny_pair.target}"]
        drafter = "{tiny_pair.drafter}"
        sources = ["{tiny_pair.more}"]
        run = "one"
        [sampling]
        max_new_tokens = 5
        temperature = 0.5
        [learn]
        rate = 0.1
        interval = 3
        [publish]
        enabled = false
        """
    )
    typed = omnidraft(
        *["replay", tiny_pair.sums, "--config", "run.toml", "--temperature", "0.25"],
        *[
            "--set",
            "learn.rate=0.002",
            "--set",
            "draft.stop=never",
            "--set",
            "drift.detector=page-hinkley",
            "--limit",
            "3",
        ],
    )
    assert typed.status == 0, typed.err
    config = load(here / "one" / "config.json")
    assert (config.sampling.max_new_tokens, config.sampling.temperature) == (5, 0.25)
    assert (config.learn.rate, config.learn.interval, config.draft.stop) == (0.002, 3, "never")
    assert (config.drift.detector, config.source.limit) == ("page-hinkley", 3)
    assert config.sources == (str(tiny_pair.sums),)
    assert table_of(here / "one", "prompts").num_rows == 3
    assert "sums" in typed.out


def test_without_a_name_a_run_gets_one_under_runs(
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
):
    command = ["replay", tiny_pair.sums, *tiny_pair.options, *QUICK, "--limit", "1", "--no-publish"]
    for _ in range(2):
        assert omnidraft(*command).status == 0
    runs = sorted((here / "runs").iterdir())
    assert len(runs) == 2
    assert all((run / "summary.json").is_file() for run in runs)


def test_the_folder_of_runs_is_set_by_the_option_or_the_variable(
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    command = ["replay", tiny_pair.sums, *tiny_pair.options, *QUICK, "--limit", "1"]
    typed = omnidraft(*command, "--runs", "by-option")
    assert typed.status == 0, typed.err
    assert (here / "by-option" / "mlflow.db").is_file(), "the store lies next to the runs"
    assert "--runs by-option" in typed.err, "and the commands that show the run name it"
    monkeypatch.setenv("OMNIDRAFT_RUNS", "by-variable")
    typed = omnidraft(*command, "--no-publish")
    assert typed.status == 0, typed.err
    assert "OMNIDRAFT_RUNS is no setting" not in typed.err
    (run,) = (here / "by-variable").iterdir()
    assert omnidraft("sql", "SELECT run, count(*) FROM prompts GROUP BY 1", "--format", "csv").out.endswith(
        f"{run.name},1\n"
    )
    assert_refused(omnidraft("replay", "--resume", "last"), "can be resumed", "below by-variable")
    assert_refused(omnidraft("replay", "--resume", "last", "--runs", "by-option"), "below by-option")
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("", "no row is left"),
        ("not json\n\n[1, 2]\n", "none of 2 rows is one"),
        (json.dumps({"prompt": "one and two. " * 400}) + "\n", "of the target's tokens"),
    ],
)
def test_sources_without_a_usable_prompt_are_refused(
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
    rows: str,
    reason: str,
):
    (here / "broken.jsonl").write_text(rows)
    typed = omnidraft("replay", "broken.jsonl", *tiny_pair.options, *QUICK)
    assert_refused(typed, "must hold at least one prompt", reason)
    assert [path.name for path in here.rglob("*") if path.is_file()] == ["broken.jsonl"]


def test_settings_come_from_the_environment_and_the_command_line_takes_precedence(
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (here / "run.toml").write_text("seed = 1\nbatch = 3\n")
    for name, value in (("SOURCE_LIMIT", "2"), ("BATCH", "2"), ("DRAFT_MAX_DRAFT", "4"), ("RUN", "named")):
        monkeypatch.setenv(f"OMNIDRAFT_{name}", value)
    command = ["replay", tiny_pair.sums, *tiny_pair.options, *QUICK, "--config", "run.toml", "--max-draft", "1"]
    typed = omnidraft(*command, "--no-publish", "--json", "-v")
    assert typed.status == 0, typed.err
    summary = json.loads(typed.out)
    assert (summary["totals"]["prompts"], summary["stopped"]) == (2, False)
    config = load(here / "named" / "config.json")
    assert (config.seed, config.batch, config.draft.max_draft, config.source.limit) == (1, 2, 1, 2)
    assert "packed forward" in typed.err, "a detail, which -v shows"


@pytest.mark.slow
def test_the_end_of_a_run_names_the_commands_that_show_it(
    runs: Path,
    omnidraft: Command,  # noqa: F811
):
    commands = list_next_commands(load(runs / "first" / "config.json"), str(runs / "first"), 4)
    assert [command.split()[1] for command in commands] == ["dashboard", "sql", "versions", "versions"]
    for command in commands[1:3]:
        typed = omnidraft(*shlex.split(command)[1:])
        assert typed.status == 0, typed.err
        assert typed.out


@pytest.mark.slow
def test_the_last_unfinished_run_is_the_one_that_resumes(
    runs: Path,
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    assert_refused(omnidraft("replay", "--resume", "last"), "can be resumed", "below runs")
    command = ["replay", tiny_pair.sums, *tiny_pair.options, *QUICK, "--limit", "2", "--no-publish", "--run"]
    show = PlainDisplay.show

    def show_and_interrupt(display: PlainDisplay, event: Event) -> None:
        show(display, event)
        if isinstance(event, PromptCompleted):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(PlainDisplay, "show", show_and_interrupt)
        assert omnidraft(*command, "runs/stopped").status == 130
    assert omnidraft(*command, "runs/finished").status == 0
    typed = omnidraft("replay", "--resume", "last")
    assert typed.status == 0, typed.err
    assert "resuming runs/stopped" in typed.err
    assert json.loads((here / "runs" / "stopped" / "summary.json").read_text())["totals"]["prompts"] == 2
    assert_refused(omnidraft("serve", "--resume", "last"), "can be resumed")


@pytest.fixture(scope="module")
def runs(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
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


def test_versions_are_sealed_in_the_run_s_folder(runs: Path):
    versions = table_of(runs / "first", "versions").to_pylist()
    assert [version["reason"] for version in versions] == ["floor", "interval", "interval", "end"]
    assert [version["parent"] for version in versions] == [None, 0, 1, 2]
    for version in versions:
        manifest = open_version(runs / "first" / version["folder"])
        assert manifest["digest"] == version["digest"]
        assert {"model.safetensors", "tokenizer.json", "head.safetensors", "ngrams.parquet"} <= set(manifest["files"])
    assert len({version["digest"] for version in versions}) == len(versions)
    summary = json.loads((runs / "first" / "summary.json").read_text())
    assert [version["version"] for version in summary["totals"]["versions"]] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("number", [1, 4])
def test_a_run_starts_from_a_registered_version(
    runs: Path,
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    number: int,
):
    """The baseline of the new run is that version: weights, head and n-grams are equal, byte for byte."""
    name = runs / f"from-{number}"
    typed = omnidraft(
        *["replay", tiny_pair.sums, "--target", tiny_pair.target, "--limit", "1", *QUICK, "--run", name],
        *["--drafter", f"models:/{find_only_model(default_uri(runs))}/{number}"],
    )
    assert typed.status == 0, typed.err
    parent = table_of(runs / "first", "versions").to_pylist()[number - 1]
    baseline = table_of(name, "versions").to_pylist()[0]
    assert baseline["reason"] == "floor"
    assert baseline["digest"] == parent["digest"]
    assert (baseline["cache_entries"], baseline["cache_entries"] > 0) == (parent["cache_entries"], True)
    assert find_only_model(default_uri(runs)), "it continues the registered model of its pair"


def test_a_version_that_does_not_exist_is_refused(
    runs: Path,
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
):
    drafter = ["--drafter", "models:/omnidraft-drafter/99"]
    typed = omnidraft("replay", tiny_pair.sums, "--target", tiny_pair.target, *drafter, "--run", runs / "no")
    assert_refused(typed, "99", "omnidraft versions")
    assert not (runs / "no").exists()


@pytest.mark.slow
def test_ctrl_c_ends_a_run_and_keeps_the_completed_prompts(
    runs: Path,
    tiny_pair: TinyPair,  # noqa: F811
    omnidraft: Command,  # noqa: F811
    tmp_path: Path,
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


def test_a_run_that_waits_for_standard_input_can_be_ended(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
):
    running = typed_in_a_process(["-", *tiny_pair.options, *QUICK, "--run", str(tmp_path / "run"), "--no-publish"])
    assert running.stdin is not None
    assert running.stderr is not None
    running.stdin.write(json.dumps({"prompt": sentences(0, 1)[0][:30]}) + "\n")
    running.stdin.flush()
    next(line for line in iter(running.stderr.readline, "") if line.startswith("1 prompts"))
    running.terminate()
    status = running.wait(timeout=60)  # standard input is still open: more prompts might come
    running.communicate()
    assert status == 130
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["totals"]["prompts"] == 1
