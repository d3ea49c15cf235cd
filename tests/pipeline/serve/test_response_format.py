"""Requests with a response format over real models: every completion that ends by itself is valid."""

import json
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from serving_tiny import assert_sound, load_pair, run_server, serve_config, submit_prompt, texts
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.serve.http.tool_calls import CallForm, CallReader, ToolUse
from pipeline.serve.messages import Finish
from pipeline.serve.run import ServerRun
from stages.sampling.grammars import GrammarSource

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
def server(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerRun]:  # noqa: F811
    run = tmp_path_factory.mktemp("served") / "run"
    with run_server(serve_config(tiny_pair), run) as server:
        yield server
    assert_sound(run)


def test_sampled_completions_are_valid(server: ServerRun):
    grammar = server.engine.compile_grammar(SOURCE)
    wishes = [{"temperature": 1.0, "seed": seed} for seed in range(8)] + [{}]
    listeners = [
        submit_prompt(server.engine, texts(700, 701)[0], grammar=grammar, max_new_tokens=LONG, **wish)
        for wish in wishes
    ]
    ended = [listener.text for listener in listeners if listener.end().finish is Finish.STOP]
    assert len(ended) > 4, "some may be cut in the middle of white space"
    for text in ended:
        value = json.loads(text)
        assert set(value) == {"n", "word"}
        assert 0 <= value["n"] <= 99
        assert value["word"] in {"apples", "pears"}


def test_greedy_text_is_that_of_a_plain_loop(server: ServerRun, tiny_pair: TinyPair):  # noqa: F811
    models, (text,) = load_pair(tiny_pair), texts(702, 703)
    grammar = server.engine.compile_grammar(SOURCE)
    prompt, emitted = models.target_vocabulary.encode(text), list[int]()
    while len(emitted) < 24 and not models.eos_ids.intersection(emitted[-1:]):
        with torch.no_grad():
            logits_V = models.target.model(torch.tensor([prompt + emitted])).logits[0, -1]
        grammar.start().apply(logits_V, emitted)
        emitted.append(int(logits_V.argmax()))
    assert submit_prompt(server.engine, text, grammar=grammar).tokens == tuple(emitted)


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
    grammar, called = server.engine.compile_grammar(source), Counter[str]()
    for seed in range(6):
        wish = {"temperature": 1.0, "seed": seed, "max_new_tokens": LONG}
        listener = submit_prompt(server.engine, texts(700, 701)[0], grammar=grammar, **wish).end()
        content, calls = CallReader(use).push(listener.text, last=True)
        assert bool(calls) == (listener.finish is Finish.STOP)
        assert bool(content) != bool(calls)
        called.update(call.name for call in calls)
    assert called
