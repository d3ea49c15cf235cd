"""Requests with a response format over real models: every completion that ends by itself is valid."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving_tiny import assert_sound, load_pair, run_server, serve_config, submit_prompt, texts
from tiny_pair import TinyPair

from pipeline.serve.http.tool_calls import CallForm, CallReader, ToolUse
from pipeline.serve.messages import Finish
from pipeline.serve.run import ServerRun
from stages.sampling.grammars import GrammarSource
from store.query.log_reader import LogReader

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "word": {"enum": ["apples", "pears"]}},
    "required": ["n", "word"],
    "additionalProperties": False,
}
SOURCE = GrammarSource("json_schema", json.dumps(SCHEMA))
LONG = 160


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerRun]:
    run = tmp_path_factory.mktemp("served") / "run"
    with run_server(serve_config(tiny_pair), run) as server:
        yield server
    assert_sound(run)


def test_greedy_text_is_that_of_a_plain_loop(server: ServerRun, tiny_pair: TinyPair):
    models, (text,) = load_pair(tiny_pair), texts(702, 703)
    grammar = server.engine.find_grammar(SOURCE)
    prompt, emitted = models.target_vocabulary.encode(text), list[int]()
    while len(emitted) < 24 and not models.eos_ids.intersection(emitted[-1:]):
        with torch.no_grad():
            logits_V = models.target.model(torch.tensor([prompt + emitted])).logits[0, -1]
        grammar.start().apply(logits_V, emitted)
        emitted.append(int(logits_V.argmax()))
    assert submit_prompt(server.engine, text, grammar=SOURCE).tokens == tuple(emitted)


def test_a_demanded_call_is_a_call(server: ServerRun):
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    use = ToolUse((), CallForm.BARE, (("add", parameters), ("now", {"type": "object"})), frozenset({"add", "now"}))
    source = use.make_grammar()
    assert source is not None
    called = Counter[str]()
    for seed in range(6):
        wish = {"temperature": 1.0, "seed": seed, "max_tokens": LONG}
        listener = submit_prompt(server.engine, texts(700, 701)[0], grammar=source, **wish).end()
        content, calls = CallReader(use).push(listener.text, last=True)
        assert bool(calls) == (listener.finish is Finish.STOP)
        assert bool(content) != bool(calls)
        called.update(call.name for call in calls)
    assert called


def test_a_grammar_that_takes_too_much_work_ends_its_own_request_alone(tiny_pair: TinyPair, tmp_path: Path):
    ambiguous = GrammarSource("grammar", "start: x\nx: /[a-z ]/ | x x | x x x | x x x x")
    with run_server(serve_config(tiny_pair), tmp_path / "run") as server:
        greedy, other = texts(700, 702)
        beside = submit_prompt(server.engine, other)
        ended = submit_prompt(server.engine, greedy, grammar=ambiguous, max_tokens=LONG).end()
        assert ended.finish is Finish.GRAMMAR
        assert beside.finish in {Finish.STOP, Finish.LENGTH}
        assert submit_prompt(server.engine, other).text == beside.text
    assert_sound(tmp_path / "run")
    with LogReader([tmp_path / "run"]) as log:
        finishes = log.select("SELECT finish FROM prompts ORDER BY finish").column(0).to_pylist()
    assert Counter(finishes)["grammar"] == 1
