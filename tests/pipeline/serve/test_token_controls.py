"""Requests with penalties, biases, other ends, min-p and grammars over real models, against a plain loop."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from plain_controls import control
from serving_tiny import (
    NEW_TOKENS,
    assert_sound,
    greedy_generate,
    load_pair,
    run_server,
    select,
    serve_config,
    submit_prompt,
    texts,
)
from tiny_pair import TinyPair

from pipeline.serve.http.tool_calls import BARE, CallReader, ToolUse
from pipeline.serve.messages import Finish
from pipeline.serve.run import ServerRun
from stages.sampling.grammars import Grammar, GrammarSource
from stages.sampling.params import SamplingParams

pytest.importorskip("llguidance")

CONTROLS = [
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=0.8,
        logit_bias=((20, 3.0), (30, -100.0)),
        ignore_eos=True,
    ),
]


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "word": {"enum": ["apples", "pears"]}},
    "required": ["n", "word"],
    "additionalProperties": False,
}
SOURCE = GrammarSource("json_schema", json.dumps(SCHEMA))
LONG = 160


def plain_loop(pair: TinyPair, text: str, controls: SamplingParams, grammar: Grammar | None = None) -> tuple[int, ...]:
    """One token per pass of the target's own modules, over the whole text, until an end."""
    models = load_pair(pair)
    prompt = models.target_vocabulary.encode(text)
    ends = {*controls.stop_token_ids, *(() if controls.ignore_eos else models.eos_ids)}
    emitted: list[int] = []
    while len(emitted) < NEW_TOKENS and not ends.intersection(emitted[-1:]):
        with torch.no_grad():
            logits_V = models.target.model(torch.tensor([prompt + emitted])).logits[0, -1]
        if grammar:
            grammar.apply(logits_V, emitted)
        logits = control(logits_V[: models.target_vocabulary.size].tolist(), prompt, emitted, controls)
        emitted.append(logits.index(max(logits)))
    return tuple(emitted)


@pytest.mark.slow
def test_greedy_requests_equal_a_plain_loop(tiny_pair: TinyPair, tmp_path):
    prompts, run = texts(700, 703), tmp_path / "run"
    with run_server(serve_config(tiny_pair), run) as server:
        listeners = [
            (text, one, submit_prompt(server.engine, text, sampling=one)) for text in prompts for one in CONTROLS
        ]
        others = [(text, submit_prompt(server.engine, text)) for text in prompts]
        sampled = [
            submit_prompt(server.engine, text, sampling=CONTROLS[0], temperature=1.0, min_p=0.1) for text in prompts
        ]
        assert all(one.end() for one in sampled)
    for text, controls, listener in listeners:
        assert listener.tokens == plain_loop(tiny_pair, text, controls)
    for text, listener in others:
        assert listener.tokens == greedy_generate(tiny_pair, text), "rows without controls are as they were"
    assert sum(listener.tokens != greedy_generate(tiny_pair, text) for text, _, listener in listeners) > 3
    assert sum(listener.usage.accepted for _, _, listener in listeners) > 0, "drafts must have been accepted"
    assert_sound(run)
    assert select(run, "SELECT count(*) AS n FROM decisions WHERE target_levels IS NOT NULL")[0]["n"]


@pytest.mark.slow
def test_a_stop_token_ends_the_row_and_is_not_in_the_text(server: ServerRun, tiny_pair: TinyPair):
    text = texts(700, 701)[0]
    whole, vocabulary = greedy_generate(tiny_pair, text), load_pair(tiny_pair).target_vocabulary
    stop = whole[5]
    listener = submit_prompt(server.engine, text, sampling=SamplingParams(stop_token_ids=(stop,), logprobs=0))
    assert (listener.finish, listener.tokens) == (Finish.STOP, whole[: whole.index(stop) + 1])
    assert listener.text == vocabulary.decode(list(listener.tokens[:-1]))
    scored = [one.token for chunk in listener.chunks for one in chunk.logprobs]
    assert scored == list(listener.tokens[:-1]), "also where the token ends inside of a character"


def test_greedy_text_with_a_grammar_is_that_of_a_plain_loop(server: ServerRun, tiny_pair: TinyPair):
    (text,) = texts(702, 703)
    grammar = server.engine.find_grammar(SOURCE).start()
    assert submit_prompt(server.engine, text, grammar=SOURCE).tokens == plain_loop(
        tiny_pair, text, SamplingParams(), grammar
    )


def test_a_demanded_call_is_a_call(server: ServerRun):
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    use = ToolUse((), BARE, (("add", parameters), ("now", {"type": "object"})), frozenset({"add", "now"}))
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
    finishes = select(tmp_path / "run", "SELECT finish FROM prompts")
    assert finishes.count({"finish": "grammar"}) == 1
