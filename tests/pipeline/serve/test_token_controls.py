"""Requests with penalties, biases, other ends and min-p over real models, against a plain loop with the same."""

from collections.abc import Iterator

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

from pipeline.serve.messages import Finish
from pipeline.serve.run import ServerRun
from stages.sampling.params import SamplingParams

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


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerRun]:
    with run_server(serve_config(tiny_pair), tmp_path_factory.mktemp("served") / "run") as server:
        yield server


def plain_loop(pair: TinyPair, text: str, controls: SamplingParams) -> tuple[int, ...]:
    """One token per pass of the target's own modules, over the whole text, until an end."""
    models = load_pair(pair)
    prompt = models.target_vocabulary.encode(text)
    ends = {*controls.stop_token_ids, *(() if controls.ignore_eos else models.eos_ids)}
    emitted: list[int] = []
    while len(emitted) < NEW_TOKENS and not ends.intersection(emitted[-1:]):
        with torch.no_grad():
            logits_V = models.target.model(torch.tensor([prompt + emitted])).logits[0, -1]
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
