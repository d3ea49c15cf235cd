"""The engine in a process of its own: it restarts after a crash, and every request gets an answer or an error."""

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from serving_process import ServerProcess, server_arguments, server_process
from serving_tiny import (
    HANG_SECONDS,
    OFTEN,
    assert_sound,
    complete_all,
    greedy_generate,
    run_server,
    select,
    serve_config,
    submit_prompt,
    texts,
    wait_until,
)
from tiny_pair import TinyPair

from pipeline.loop import UnfitPromptError
from pipeline.serve.engine_process import EngineDownError, EngineProcess
from pipeline.serve.messages import BusyError, Finish
from stages.sampling.grammars import GrammarSource
from stages.sampling.params import SamplingParams
from stages.sampling.transforms import LogitTransform
from store.child import RestartBudget
from store.errors import ConfigError, RunError
from store.events import BlockDone, Event
from store.fault_points import VARIABLE
from store.log.lock import OWNER
from store.log.partitions import LEARNER, partition_folder

LONG = {"max_tokens": 900, "temperature": 2.0, "sampling": SamplingParams(ignore_eos=True)}
TEXT = "Ann has 3"


@contextmanager
def engine_process(
    pair: TinyPair, run: Path, events: list[Event] | None = None, most: int = 5, **changes: Any
) -> Iterator[EngineProcess]:
    found: list[Event] = [] if events is None else events
    budget = RestartBudget(most, first_delay=0.01)
    with EngineProcess(serve_config(pair, **OFTEN, **changes), str(run), found.append, budget=budget) as engine:
        yield engine


def kill(engine: EngineProcess) -> None:
    assert engine.pid
    os.kill(engine.pid, signal.SIGKILL)


def wait_for_restart(engine: EngineProcess, restarts: int = 1) -> None:
    wait_until(lambda: engine.read_status().ready and engine.read_status().engine_restarts == restarts)


@pytest.mark.slow
def test_it_answers_as_an_engine_in_this_process(tiny_pair: TinyPair, tmp_path: Path):
    events: list[Event] = []
    schema = GrammarSource("json_schema", json.dumps({"enum": ["yes", "no"]}))
    with engine_process(tiny_pair, tmp_path / "run", events) as engine:
        prompts = texts(700, 704)
        for prompt, listener in zip(prompts, complete_all(engine, prompts), strict=True):
            assert listener.tokens == greedy_generate(tiny_pair, prompt)
        ruled = submit_prompt(engine, TEXT, grammar=schema, logprobs=1)
        assert json.loads(ruled.text) in ("yes", "no")
        assert sum(len(chunk.logprobs) for chunk in ruled.chunks) == len(ruled.tokens) - 1, "all but the end"
        with pytest.raises(ConfigError):
            engine.compile_grammar(GrammarSource("grammar", "start: nothing"))
        with pytest.raises(UnfitPromptError, match="a prompt must have 1 to"):
            engine.encode("a" * 900_000)
        wait_until(lambda: engine.read_status().running == 0)
        assert sum(event.emitted for event in events if isinstance(event, BlockDone)) >= 4
        vocabulary = engine.vocabulary_size, [engine.decode_token(token) for token in range(-1, 300)]
    assert_sound(tmp_path / "run")
    assert len(select(tmp_path / "run", "SELECT * FROM prompts")) == 5
    with run_server(serve_config(tiny_pair), tmp_path / "other") as server:
        assert vocabulary[0] == server.engine.vocabulary_size
        assert vocabulary[1][1:] == [server.engine.decode_token(token) for token in range(300)]


@pytest.mark.slow
def test_after_a_kill_every_request_fails_and_the_run_resumes(tiny_pair: TinyPair, tmp_path: Path):
    run = tmp_path / "run"
    with engine_process(tiny_pair, run, batch=1, serve__waiting=2) as engine:
        done = [one for text in texts(700, 703) for one in complete_all(engine, [text])]
        wait_until(lambda: len(select(run, "SELECT * FROM prompts")) == 3)
        before = select(run, 'SELECT * FROM prompts ORDER BY "offset"')
        running = submit_prompt(engine, TEXT, **LONG)
        wait_until(lambda: bool(running.chunks))
        waiting = [submit_prompt(engine, TEXT), submit_prompt(engine, TEXT)]
        with pytest.raises(BusyError, match="2 requests are waiting"):
            submit_prompt(engine, TEXT)
        kill(engine)
        assert [listener.finish for listener in (running, *waiting)] == [Finish.FAILED] * 3
        wait_until(lambda: not engine.read_status().ready or engine.read_status().engine_restarts == 1)
        with pytest.raises(EngineDownError) as refused:
            submit_prompt(engine, TEXT)
        assert refused.value.restarting
        assert refused.value.retry_after >= 1
        wait_for_restart(engine)
        again = [one for text in texts(700, 703) for one in complete_all(engine, [text])]
        assert [one.tokens for one in again] == [one.tokens for one in done]
    assert_sound(run)
    after = select(run, 'SELECT * FROM prompts ORDER BY "offset"')
    assert after[:3] == before, "nothing that was committed is lost, nothing is there twice"
    assert [row["finish"] for row in after[3:]] == [row["finish"] for row in before]
    assert len({row["offset"] for row in after}) == len(after) == 6


@pytest.mark.slow
def test_a_waiting_call_fails_too(tiny_pair: TinyPair, tmp_path: Path):
    """Tokenisation, too, runs in the engine's process."""
    failed: list[BaseException] = []

    def encode(engine: EngineProcess) -> None:
        try:
            engine.encode(TEXT)
        except BusyError as error:
            failed.append(error)

    with engine_process(tiny_pair, tmp_path / "run") as engine:
        assert engine.pid
        os.kill(engine.pid, signal.SIGSTOP)  # so that nothing is answered before it is killed
        calls = [threading.Thread(target=encode, args=(engine,)) for _ in range(3)]
        for call in calls:
            call.start()
        wait_until(lambda: len(engine._calls) == 3)
        kill(engine)
        for call in calls:
            call.join(HANG_SECONDS)
        assert len(failed) == 3
        wait_for_restart(engine)
        assert engine.encode(TEXT).text == TEXT


@pytest.mark.sweep
def test_an_engine_that_always_fails_is_restarted_so_often_and_no_more(
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv(VARIABLE, "commit: before the manifest=1")  # each process is killed at its first commit

    def crash_until_it_gives_up() -> None:
        with engine_process(tiny_pair, tmp_path / "run", most=2) as engine:
            for restarts in (1, 2, 3):
                submit_prompt(engine, TEXT).end()
                if restarts < 3:
                    wait_for_restart(engine, restarts)
            wait_until(lambda: engine.failure is not None)
            assert not engine.read_status().ready
            assert engine.read_status().engine_restarts == 2
            with pytest.raises(EngineDownError):
                submit_prompt(engine, TEXT)

    with pytest.raises(RunError, match="the engine stopped"):
        crash_until_it_gives_up()
    assert sum("it resumes from its last commit" in message for message in caplog.messages) == 2
    assert sum("not restarted any more" in message for message in caplog.messages) == 1


class RaisingControls(SamplingParams):
    """Controls with a fault that the engine's thread meets."""

    def make_transforms(self, prompt: Sequence[int]) -> tuple[LogitTransform, ...]:
        raise ZeroDivisionError("a fault of these controls")


@pytest.mark.slow
def test_an_error_of_the_engine_restarts_it(tiny_pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with engine_process(tiny_pair, tmp_path / "run") as engine:
        (before,) = complete_all(engine, texts(700, 701))
        wait_until(lambda: len(select(tmp_path / "run", "SELECT * FROM prompts")) == 1)
        assert submit_prompt(engine, TEXT, sampling=RaisingControls()).finish is Finish.FAILED
        wait_for_restart(engine)
        (after,) = complete_all(engine, texts(700, 701))
        assert after.tokens == before.tokens
    assert any("a fault of these controls" in message for message in caplog.messages)
    assert_sound(tmp_path / "run")


def wait_for_owner(folder: Path, after: int = 0) -> int:
    """The process that writes a log, once it is another than `after`."""
    found = [after]

    def is_there() -> bool:
        if (folder / OWNER).exists():
            found.append(json.loads((folder / OWNER).read_bytes())["pid"])
        return found[-1] != after

    wait_until(is_there)
    return found[-1]


def post(server: ServerProcess, **fields: Any) -> Any:
    body = {"model": "any", "prompt": TEXT, "max_tokens": 900, "temperature": 2, "ignore_eos": True, **fields}
    return urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def read_metric(server: ServerProcess, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=HANG_SECONDS) as answer:
        (value,) = re.findall(rf"^omnidraft:{name}\{{.*\}} (.*)$", answer.read().decode(), re.MULTILINE)
    return float(value)


def is_ready(server: ServerProcess) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=HANG_SECONDS) as answer:
            return bool(answer.status == 200)
    except HTTPError as error:
        return error.code == 200


@pytest.mark.slow
def test_clients_of_the_command_get_an_error_and_are_served_again(tiny_pair: TinyPair, tmp_path: Path):
    run = tmp_path / "run"
    arguments = server_arguments(tiny_pair, run, **OFTEN)
    with server_process(tmp_path / "world", *arguments) as server:
        model = server.model()
        server.complete(TEXT, model=model)
        engine, learner = wait_for_owner(run), wait_for_owner(partition_folder(run, LEARNER))
        errors: list[tuple[int, Any]] = []

        def request_whole() -> None:
            try:
                urllib.request.urlopen(post(server, model=model), timeout=HANG_SECONDS).read()
            except HTTPError as error:
                errors.append((error.code, json.load(error)))

        client = threading.Thread(target=request_whole)
        client.start()
        with urllib.request.urlopen(post(server, model=model, stream=True), timeout=HANG_SECONDS) as stream:
            stream.readline()
            os.kill(engine, signal.SIGKILL)
            last = [line for line in stream.read().split(b"\n\n") if line][-1]
        assert json.loads(last.strip().removeprefix(b"data: "))["error"]["code"] == "internal_error"
        client.join(HANG_SECONDS)
        ((status, body),) = errors
        assert status in (500, 503), "503 where it came after the crash"
        assert body["error"]["type"] == "server_error"
        wait_until(lambda: is_ready(server))
        assert read_metric(server, "engine_restarts_total") == 1
        assert server.complete(TEXT, model=model)["choices"][0]["finish_reason"] in ("stop", "length")
        wait_until(lambda: not Path(f"/proc/{learner}").exists())  # the learner ends with its engine
        os.kill(wait_for_owner(partition_folder(run, LEARNER), learner), signal.SIGKILL)
        wait_until(lambda: read_metric(server, "learner_restarts_total") == 1)
        server.complete(TEXT, model=model)
        assert server.end() == 0, server.err
    assert "the engine stopped" in server.err
    assert "the engine serves again" in server.err
    assert_sound(run)
