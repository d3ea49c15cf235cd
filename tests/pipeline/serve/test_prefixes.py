"""Known prefixes of a server: the same text with and without them, and nobody uses those of another tenant."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving_tiny import (
    RecordingListener,
    assert_sound,
    complete_all,
    greedy_generate,
    make_request,
    run_server,
    serve_config,
    submit_prompt,
)
from tiny_pair import TinyPair, sentences

from pipeline.serve.engine import LiveEngine
from pipeline.serve.messages import Chunk, Finish
from pipeline.serve.run import ServerRun
from stages.prompts.prompt_reader import UNREAD

SYSTEM = " ".join(sentences(20, 22))
QUESTIONS = [f"{SYSTEM} {text[:30]}" for text in sentences(800, 804)]


def count_copied(engine: LiveEngine) -> int:
    return engine.read_status().prefixes.copied_prompts


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"prompts__cache_bytes": 0}], ids=str)
def test_greedy_text_is_that_of_plain_decoding(tiny_pair: TinyPair, tmp_path: Path, changes: dict[str, Any]):
    with run_server(serve_config(tiny_pair, **changes), tmp_path / "run") as server:
        found = [submit_prompt(server.engine, text).tokens for text in QUESTIONS[:1]]
        found += [one.tokens for one in complete_all(server.engine, QUESTIONS[1:])]
        turn = QUESTIONS[0] + submit_prompt(server.engine, QUESTIONS[0]).text + " Then"
        assert submit_prompt(server.engine, turn).tokens == greedy_generate(tiny_pair, turn)
        status = server.engine.read_status()
    assert found == [greedy_generate(tiny_pair, text) for text in QUESTIONS]
    if changes.get("prompts__cache_bytes") == 0:
        assert (status.prefixes.copied_tokens, status.prefix_bytes) == (0, 0)
    else:
        assert status.prefixes.copied_prompts == len(QUESTIONS) + 1, "all but the first"
        assert 0 < status.prefixes.copied_tokens < status.prefixes.tokens
        assert 0 < status.prefix_bytes <= server.config.prompts.cache_bytes


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_tenants_are_apart_unless_they_share(tiny_pair: TinyPair, tmp_path: Path, shared: bool):
    with run_server(serve_config(tiny_pair, prompts__share_tenants=shared), tmp_path / "run") as server:
        hits = []
        for tenant in ("ann", "ida", "", "ida"):
            before = count_copied(server.engine)
            submit_prompt(server.engine, QUESTIONS[0], tenant=tenant).end()
            hits.append(count_copied(server.engine) - before)
    assert hits == ([0, 1, 1, 1] if shared else [0, 0, 0, 1])


def run_while_reading(
    server: ServerRun, prompt: str, act: Callable[[Callable[[], None]], None]
) -> tuple[RecordingListener, RecordingListener, int]:
    """Submit a prompt after the first block of a running request; act on its cancellation after three more blocks.

    Returns:
        the listeners of both, and the number of blocks of the running request before the prompt's first chunk.
    """
    running, reading, before = RecordingListener(), RecordingListener(), []
    cancel: list[Callable[[], None]] = []

    def on_running(chunk: Chunk) -> None:
        running(chunk)
        if len(running.chunks) == 1:
            cancel.append(server.engine.submit(make_request(server.engine, prompt), on_reading))
        elif len(running.chunks) == 4:
            act(*cancel)

    def on_reading(chunk: Chunk) -> None:
        before.append(len(running.chunks))
        reading(chunk)

    server.engine.submit(make_request(server.engine, "Ann has", max_tokens=60), on_running)
    return running.end(), reading.end(), before[0]


@pytest.mark.constants(prompt_chunk=4)
def test_a_running_request_continues_while_a_long_prompt_is_read(tiny_pair: TinyPair, tmp_path: Path):
    with run_server(serve_config(tiny_pair, draft__max_draft=0), tmp_path / "run") as server:
        parts = (len(server.engine.encode(QUESTIONS[0]).tokens) - UNREAD) // 4
        running, reading, before = run_while_reading(server, QUESTIONS[0], lambda cancel: None)
    assert running.tokens == greedy_generate(tiny_pair, "Ann has", 60)
    assert reading.tokens == greedy_generate(tiny_pair, QUESTIONS[0])
    assert before > parts > 5


@pytest.mark.constants(prompt_chunk=8)
def test_a_request_that_is_cancelled_while_its_prompt_is_read_ends_at_once(tiny_pair: TinyPair, tmp_path: Path):
    """The part of its prompt that was read is known to the next request."""
    run = tmp_path / "run"
    with run_server(serve_config(tiny_pair, draft__max_draft=0), run) as server:
        running, cancelled, before = run_while_reading(server, QUESTIONS[0], lambda cancel: cancel())
        again = submit_prompt(server.engine, QUESTIONS[0]).tokens
        assert count_copied(server.engine) == 1
    assert (cancelled.finish, cancelled.usage.blocks, cancelled.tokens, before) == (Finish.CANCELLED, 0, (), 4)
    assert running.tokens == greedy_generate(tiny_pair, "Ann has", 60)
    assert again == greedy_generate(tiny_pair, QUESTIONS[0])
    assert_sound(run)
