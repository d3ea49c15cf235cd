"""`omnidraft serve` on the command line: it answers, ends in order, resumes, and reports what it cannot do."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import typer
from replaying import Command
from serving_process import server_arguments, server_process
from serving_tiny import assert_sound, greedy_generate, select, wait_until
from tiny_pair import TinyPair
from typer.testing import CliRunner

from pipeline.cli import run as run_commands
from store.log.manifest import read_manifest

PROMPT = "Ann has 3 apples and finds"


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("text", [True, False], ids=["texts", "no texts"])
def test_it_answers_ends_in_order_and_resumes(tiny_pair: TinyPair, tmp_path: Path, omnidraft: Command, text: bool):
    run = tmp_path / "run"
    words = server_arguments(tiny_pair, run, "--learn", "off", *([] if text else ["--no-log-text"]))
    with server_process(tmp_path / "world", *words) as server:
        answer = server.complete(PROMPT, model=server.model())
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        assert answer["usage"]["completion_tokens"] == len(greedy_generate(tiny_pair, PROMPT, 12))
        assert server.end(signal.SIGTERM) == 0, server.err
    assert f"omnidraft serve --resume {run}" in server.err
    with server_process(tmp_path / "world", "--resume", run, "--port", 0) as server:
        again = server.complete(PROMPT, model=server.model())
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert server.end(signal.SIGINT) == 0, server.err
    assert omnidraft("check", "--run", run).status == 0
    prompts = select(run, 'SELECT "offset", prompt_text, completion_text FROM prompts ORDER BY "offset"')
    completion = answer["choices"][0]["text"]
    kept = (PROMPT, completion) if text else ("", "")
    assert [tuple(row.values()) for row in prompts] == [(0, *kept), (1, *kept)]


@pytest.mark.slow
def test_a_killed_server_resumes_with_what_it_committed(tiny_pair: TinyPair, tmp_path: Path):
    """Every committed prompt is in the log once; offsets continue and none is used again."""
    run = tmp_path / "run"
    often = {"commit__seconds": 0.01}
    with server_process(tmp_path / "world", *server_arguments(tiny_pair, run, "--learn", "off", **often)) as server:
        for number in range(5):
            server.complete(f"Tom has {number} pencils", model=server.model())
        wait_until(lambda: sum(part.rows for part in read_manifest(run).tables["prompts"]) >= 4)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    before = select(run, 'SELECT * FROM prompts ORDER BY "offset"')
    with server_process(tmp_path / "world", "--resume", run, "--port", 0) as server:
        server.complete(PROMPT, model=server.model())
        assert server.end() == 0, server.err
    after = select(run, 'SELECT * FROM prompts ORDER BY "offset"')
    assert after[:-1] == before
    assert after[-1]["prompt_text"] == PROMPT
    offsets = [row["offset"] for row in after]
    assert offsets == sorted(set(offsets)), "no offset is used again"
    assert_sound(run)


def test_a_port_in_use_is_reported_in_one_sentence(tiny_pair: TinyPair, tmp_path: Path, omnidraft: Command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        typed = omnidraft("serve", *tiny_pair.options, "--port", port, "--run", tmp_path / "run")
    assert typed.status == 2
    assert str(port) in typed.err
    assert "Traceback" not in typed.err
    assert len([line for line in typed.err.splitlines() if line.startswith("omnidraft: ")]) == 1
    assert not (tmp_path / "run").exists()


@pytest.fixture
def begun(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A run that can be resumed, as far as its settings show."""
    from serving_tiny import serve_config

    run = tmp_path / "begun"
    run.mkdir()
    (run / "config.json").write_text(serve_config(tiny_pair).to_json())
    return run


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        (["--batch", "2"], "batch"),
        (["--drafter", "other"], "drafter"),
        (["--no-log-text"], "log.text"),
        (["--set", "learn.rate=1"], "learn.rate"),
        (["--config", "other.toml"], "--config"),
        (["--target", "other"], "targets"),
        (["--temperature", "0.5"], "sampling.temperature"),
    ],
)
def test_a_server_resumes_with_its_own_settings_alone(omnidraft: Command, begun: Path, option: list[str], setting: str):
    typed = omnidraft("serve", "--resume", begun, "--port", 0, *option)
    assert typed.status == 2
    assert "settings that it began with" in typed.err
    assert setting in typed.err


def test_processes_that_the_server_starts_do_not_inherit_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}

    def record(*given: Any, **_: Any) -> None:
        seen["key"], seen["inherited"] = given[-1]["api_key"], os.environ.get("OMNIDRAFT_API_KEY")

    monkeypatch.setattr(run_commands, "_serve", record)
    monkeypatch.setenv("OMNIDRAFT_API_KEY", "secret")
    app = typer.Typer()
    app.command()(run_commands.serve)
    result = CliRunner().invoke(app, ["--run", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert seen == {"key": "secret", "inherited": None}
