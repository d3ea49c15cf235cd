"""Requests with a response format over real models: every completion that ends by itself is valid."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving_tiny import assert_sound, load_pair, run_server, serve_config, submit_prompt, texts
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

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
# No value of these is longer than the completions of the test: a random target would fill any string.
SCHEMAS = (
    SCHEMA,
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "at": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": -9, "maximum": 9}]},
        },
        "required": ["name", "at"],
        "additionalProperties": False,
    },
)
SAMPLES = 1000


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
        submit_prompt(server.engine, texts(700, 701)[0], grammar=grammar, max_tokens=LONG, **wish) for wish in wishes
    ]
    ended = [listener.text for listener in listeners if listener.end().finish is Finish.STOP]
    assert len(ended) > 4, "some may be cut in the middle of white space"
    for text in ended:
        value = json.loads(text)
        assert set(value) == {"n", "word"}
        assert 0 <= value["n"] <= 99
        assert value["word"] in {"apples", "pears"}


def randomise_weights(pair: TinyPair, folder: Path) -> TinyPair:
    """A copy of the target with random weights, so that the grammar alone makes its text valid."""
    target = shutil.copytree(pair.target, folder / "target")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(target / "model.safetensors")
    drawn = {name: torch.randn(old.shape, generator=generator) * 0.1 for name, old in weights.items()}
    save_file(drawn, target / "model.safetensors", metadata={"format": "pt"})
    return replace(pair, target=target)


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_a_thousand_completions_of_a_random_target_are_valid(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    jsonschema = pytest.importorskip("jsonschema")
    valid, accepted = 0, 0
    with run_server(serve_config(randomise_weights(tiny_pair, tmp_path)), tmp_path / "run") as server:
        grammars = [server.engine.compile_grammar(GrammarSource("json_schema", json.dumps(one))) for one in SCHEMAS]
        for begin in range(0, SAMPLES, 20):
            listeners = [
                submit_prompt(
                    server.engine,
                    texts(700 + seed % 50, 701 + seed % 50)[0],
                    grammar=grammars[seed % len(SCHEMAS)],
                    max_tokens=220,
                    temperature=1.0,
                    seed=seed,
                )
                for seed in range(begin, begin + 20)
            ]
            for seed, listener in enumerate(listeners, begin):
                assert listener.finish is Finish.STOP, listener.text
                jsonschema.validate(json.loads(listener.text), SCHEMAS[seed % len(SCHEMAS)])
                valid += 1
                accepted += listener.usage.accepted
    assert valid == SAMPLES
    assert accepted, "drafts were judged"
    assert_sound(tmp_path / "run")


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
        wish = {"temperature": 1.0, "seed": seed, "max_tokens": LONG}
        listener = submit_prompt(server.engine, texts(700, 701)[0], grammar=grammar, **wish).end()
        content, calls = CallReader(use).push(listener.text, last=True)
        assert bool(calls) == (listener.finish is Finish.STOP)
        assert bool(content) != bool(calls)
        called.update(call.name for call in calls)
    assert called


def test_a_grammar_that_takes_too_much_work_ends_its_own_request_alone(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    ambiguous = GrammarSource("grammar", "start: x\nx: /[a-z ]/ | x x | x x x | x x x x")
    with run_server(serve_config(tiny_pair), tmp_path / "run") as server:
        grammar = server.engine.compile_grammar(ambiguous)
        greedy, other = texts(700, 702)
        beside = submit_prompt(server.engine, other)
        ended = submit_prompt(server.engine, greedy, grammar=grammar, max_tokens=LONG).end()
        assert ended.finish is Finish.GRAMMAR
        assert beside.finish in {Finish.STOP, Finish.LENGTH}
        assert submit_prompt(server.engine, other).text == beside.text
    assert_sound(tmp_path / "run")
    with LogReader([tmp_path / "run"]) as log:
        finishes = log.select("SELECT finish FROM prompts ORDER BY finish").column(0).to_pylist()
    assert Counter(finishes)["grammar"] == 1
