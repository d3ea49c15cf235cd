"""The engine of a server: a completion equals that of the target alone, whatever else runs at the same time."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_tiny import (
    HANG_SECONDS,
    RecordingListener,
    assert_sound,
    complete_all,
    greedy_generate,
    load_pair,
    make_request,
    run_server,
    select,
    serve_config,
    submit_prompt,
    texts,
    wait_until,
)
from tiny_pair import TinyPair

from pipeline.assembly.stages import CHUNK
from pipeline.serve.engine import LiveEngine
from pipeline.serve.messages import Finish
from pipeline.serve.run import ServerRun
from stages.prompts.prompt_reader import UNREAD

LEARNING = {"learn__spacing": "fixed", "learn__interval": 2}
SAMPLED = {"temperature": 1.0}


@pytest.fixture
def engine(server: ServerRun) -> LiveEngine:
    return server.engine


def submit_mixed(engine: LiveEngine, order: random.Random, prompts: list[str]) -> dict[str, RecordingListener]:
    """Submit requests of all kinds at once and return the listeners of the greedy ones by prompt."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "logprobs": 2},
        {"temperature": 1.3, "top_p": 0.8, "stop": ("and", "more")},
        {"max_tokens": 3, "store": False},
    ]
    requests = [(text, kind) for text in prompts for kind in kinds]
    order.shuffle(requests)
    listeners = [(text, kind, submit_prompt(engine, text, **kind)) for text, kind in requests]
    return {text: one.end() for text, kind, one in listeners if one.end() and not kind}


@pytest.mark.representatives("live")
@pytest.mark.parametrize("learn", ["off", "shadow", "live"])
def test_greedy_requests_equal_plain_decoding(tiny_pair: TinyPair, tmp_path: Path, learn: str):
    """Many at once, in random order, among requests of all other kinds, and while the drafter learns."""
    prompts, run = texts(700, 708 if learn == "off" else 703), tmp_path / "run"
    expected = {text: greedy_generate(tiny_pair, text) for text in prompts}
    with run_server(serve_config(tiny_pair, serve__learn=learn, **LEARNING), run) as server:
        order = random.Random(3)
        first = submit_mixed(server.engine, order, prompts)
        if learn == "live":
            wait_until(
                lambda: bool(complete_all(server.engine, prompts[:1]) and server.engine.read_status().drafter_version)
            )
        second = submit_mixed(server.engine, order, prompts)
    for greedy in (first, second):
        assert {text: listener.tokens for text, listener in greedy.items()} == expected
    assert_sound(run)
    served = {row["drafter_version"] for row in select(run, "SELECT DISTINCT drafter_version FROM decisions")}
    made = {row["drafter_version"] for row in select(run, "SELECT drafter_version FROM updates WHERE served")}
    assert served <= {0} | made, "every version that a decision names is known"
    assert (len(served) > 1) == (learn == "live")
    assert bool(made) == (learn != "off")


def test_usage_divides_blocks_by_length_and_tokens_by_source(engine: LiveEngine):
    usages = [one.usage for one in complete_all(engine, texts(700, 705))]
    for usage in usages:
        assert sum(usage.lengths) == usage.blocks
        assert sum(length * number for length, number in enumerate(usage.lengths)) == usage.accepted
        assert sum(usage.sources.values()) == usage.emitted
        assert sum(number for source, number in usage.sources.items() if source != "target") == usage.accepted
    assert {"target", "model"} <= set().union(*(usage.sources for usage in usages))


def test_nothing_changes_between_requests_when_nothing_learns(tiny_pair: TinyPair, tmp_path: Path):
    """Neither the n-gram cache nor the choice of a draft, so that a seed gives the same text."""
    changes = {"draft__costs": "estimated", "draft__stop": 0.9, "draft__sources": ("model",)}
    with run_server(serve_config(tiny_pair, **changes), tmp_path / "run") as server:
        tokens = [submit_prompt(server.engine, "Ann has 3 apples", seed=11, **SAMPLED).tokens for _ in range(4)]
        assert tokens == tokens[:1] * 4
        assert len(set(submit_prompt(server.engine, "Tom has", seed=1, **SAMPLED).usage.sources)) > 1
    versions = select(tmp_path / "run", "SELECT DISTINCT cache_version FROM decisions")
    assert versions == [{"cache_version": 0}]


def test_a_seed_gives_the_text_of_plain_decoding_next_to_any_others(tiny_pair: TinyPair, tmp_path: Path):
    prompts = list(enumerate(texts(700, 716)))
    with run_server(serve_config(tiny_pair, draft__max_draft=0), tmp_path / "plain") as server:
        plain = [submit_prompt(server.engine, text, seed=seed, **SAMPLED).end().tokens for seed, text in prompts]
    assert len(set(plain)) == len(plain)
    config = serve_config(tiny_pair, draft__costs=0.1, serve__learn="live", **LEARNING)
    with run_server(config, tmp_path / "run") as server:
        for _ in range(3):
            others = [submit_prompt(server.engine, text, **SAMPLED) for _, text in prompts[::4]]
            seeded = [submit_prompt(server.engine, text, seed=seed, **SAMPLED) for seed, text in prompts]
            assert [one.end().tokens for one in seeded] == plain
            assert all(other.end() for other in others)
    assert_sound(tmp_path / "run")
    (counts,) = select(
        tmp_path / "run", "SELECT count(noise) AS seeded, sum(accepted + lookup_accepted) AS accepted FROM prompts"
    )
    assert (counts["seeded"], counts["accepted"] > 20) == (3 * len(prompts), True)


def test_a_prediction_is_a_draft(tiny_pair: TinyPair, tmp_path: Path):
    """It changes the number of passes, not the text."""
    config = serve_config(tiny_pair, draft__costs=0.05, draft__sources=("own",))  # drafts pay on every machine
    alone, with_text = [], []
    with run_server(config, tmp_path / "run", keeps=True) as server:
        for text in texts(610, 620):
            whole = submit_prompt(server.engine, text, temperature=0.0).end()
            again = submit_prompt(server.engine, text, temperature=0.0, prediction=(3, *whole.tokens)).end()
            assert again.tokens == whole.tokens
            alone.append(whole.usage.blocks)
            with_text.append(again.usage.blocks)
    assert sum(with_text) < 0.8 * sum(alone)


def test_a_stop_string_cuts_the_text_and_ends_the_row(engine: LiveEngine, tiny_pair: TinyPair):
    vocabulary = load_pair(tiny_pair).target_vocabulary
    for text in texts(700, 706):
        tokens = greedy_generate(tiny_pair, text)
        whole = vocabulary.decode(list(tokens))
        stop = whole[6:9]
        listener = submit_prompt(engine, text, stop=("never there", stop))
        assert listener.text == whole[: whole.index(stop)]
        assert listener.finish is Finish.STOP
        assert listener.tokens == tokens[: len(listener.tokens)]
        assert len(listener.tokens) < len(tokens), "nothing is decoded after it"


def test_logprobs_come_with_every_token_but_the_end(engine: LiveEngine):
    for most in (0, 3):
        listener = submit_prompt(engine, "Ann has 3 apples", logprobs=most)
        scores = [one for chunk in listener.end().chunks for one in chunk.logprobs]
        shown = listener.tokens[:-1] if listener.finish is Finish.STOP else listener.tokens
        assert tuple(score.token for score in scores) == shown
        assert all(score.logprob <= 0 and len(score.top) == most for score in scores)
        assert sum(bool(score.source) for score in scores) in (listener.usage.accepted, listener.usage.accepted - 1)
        if most:
            assert all(score.top[0] == (score.token, score.logprob) for score in scores), "greedy takes the likeliest"
    assert not any(chunk.logprobs for chunk in submit_prompt(engine, "Ann has 3 apples").end().chunks)


def test_an_echoed_prompt_has_the_scores_of_a_pass_over_its_text(server: ServerRun, tiny_pair: TinyPair):
    """Short and longer than a pass, with and without a completion, beside others that are read or decoded."""
    engine, target = server.engine, load_pair(tiny_pair).target
    prompts = [" ".join(texts(700, 723)), "Ann has 3 apples", "Ann has 3 apples and", "A"]
    others = [submit_prompt(engine, text) for text in texts(708, 711)]
    asked = [(text, most) for text in prompts for most in (0, 1, 5)]
    listeners = [
        submit_prompt(engine, text, max_tokens=most, logprobs=2, echo=True, temperature=1.0) for text, most in asked
    ]
    for (text, most), listener in zip(asked, listeners, strict=True):
        tokens = engine.encode(text).tokens
        scores = [one for chunk in listener.end().chunks for one in chunk.logprobs]
        assert tuple(one.token for one in scores) == (*tokens, *listener.tokens), "also of a token that ends the text"
        assert listener.text.startswith(text)
        ends = bool(target.eos_ids & {*listener.tokens})
        assert listener.finish is (Finish.STOP if ends else Finish.LENGTH)
        assert ends or len(listener.tokens) == most
        with torch.no_grad():
            expected_TV = target.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert (scores[0].logprob, scores[0].top) == (None, ())
        for place, score in enumerate(scores[1 : len(tokens)]):
            assert score.logprob == pytest.approx(float(expected_TV[place, score.token]), abs=1e-4)
            best = expected_TV[place].topk(2).values.tolist()
            assert [logprob for _, logprob in score.top] == pytest.approx(best, abs=1e-4)
    assert len(engine.encode(prompts[0]).tokens) > CHUNK + UNREAD
    assert [other.tokens for other in others] == [greedy_generate(tiny_pair, text) for text in texts(708, 711)]


def test_a_prompt_that_is_only_read_serves_the_next_one(engine: LiveEngine):
    text = " ".join(texts(720, 726))
    read = submit_prompt(engine, text, max_tokens=0)
    assert (read.text, read.tokens, read.finish, read.usage.blocks) == ("", (), Finish.LENGTH, 0)
    before = engine.read_status().prefixes.copied_tokens
    submit_prompt(engine, text, max_tokens=1).end()
    assert engine.read_status().prefixes.copied_tokens > before


def test_a_cancelled_request_frees_its_place_within_a_block(server: ServerRun):
    held = RecordingListener(hold=2)
    cancel = server.engine.submit(make_request(server.engine, "Ann has 3 apples", max_tokens=100), held)
    other = submit_prompt(server.engine, "Tom has 4 pencils", max_tokens=60)
    assert held.reached.wait(HANG_SECONDS)
    cancel()
    held.go.set()
    assert held.finish is Finish.CANCELLED
    assert held.usage.blocks == 2, "the block in which it was cancelled was its last"
    assert len(held.tokens) == held.usage.emitted > 0
    other.end()
    wait_until(lambda: server.engine.read_status().running == 0)
    wait_until(
        lambda: server.models.target._order == server.models.drafter._order == []
    )  # released after the last chunk
    cancel()  # after the end: harmless
    assert held.finishes == [Finish.CANCELLED]


def test_a_deadline_ends_a_running_request(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch):
    held = RecordingListener(hold=1)
    engine.submit(make_request(engine, "Ann has 3 apples", max_tokens=100, timeout_seconds=1000), held)
    assert held.reached.wait(HANG_SECONDS)
    late = submit_prompt(engine, "Tom has 4 pencils", timeout_seconds=1e-9)
    monkeypatch.setattr(engine._queue, "_clock", lambda: time.monotonic() + 1001)  # the engine is held meanwhile
    held.go.set()
    assert held.finish is Finish.DEADLINE
    assert held.usage.blocks >= 1
    assert late.finish is Finish.DEADLINE
    assert late.usage.blocks == 0
