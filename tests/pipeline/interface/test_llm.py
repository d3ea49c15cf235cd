"""`pipeline.LLM`: completions in this process, without HTTP."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from replaying import QUICK
from serving_tiny import NEW_TOKENS, assert_sound, greedy_generate, load_pair, select, texts, wait_until
from tiny_pair import TinyPair

import pipeline

PROMPTS = texts(700, 706)
GREEDY = {"temperature": 0, "max_tokens": NEW_TOKENS}


def make_llm(pair: TinyPair, **changes: Any) -> pipeline.LLM:
    return pipeline.LLM(pair.target, changes.pop("drafter", pair.drafter), config={**QUICK, "device": "cpu"}, **changes)


@pytest.fixture(scope="module")
def llm(tiny_pair: TinyPair) -> Iterator[pipeline.LLM]:
    threads = torch.get_num_threads()
    with make_llm(tiny_pair, batch=3) as llm:
        assert torch.get_num_threads() == threads
        yield llm


def test_greedy_completions_are_the_target_s(llm: pipeline.LLM, tiny_pair: TinyPair):
    completions = llm.generate(PROMPTS, **GREEDY)
    assert [one.tokens for one in completions] == [greedy_generate(tiny_pair, text) for text in PROMPTS]
    words = load_pair(tiny_pair).target_vocabulary
    assert completions[0].text == words.decode(list(completions[0].tokens))
    assert {one.finish for one in completions} <= {"stop", "length"}
    assert all(one.usage.emitted == len(one.tokens) for one in completions)
    assert max(one.tokens_per_pass for one in completions) > 1


def test_a_stream_is_the_completion_in_parts(llm: pipeline.LLM):
    parts = list(llm.stream(PROMPTS[0], **GREEDY))
    assert "".join(parts) == llm.generate(PROMPTS[0], **GREEDY).text
    assert len(parts) > 1


def test_a_conversation_is_completed(llm: pipeline.LLM):
    messages = [{"role": "user", "content": PROMPTS[0]}]
    assert llm.chat(messages, **GREEDY).text == "".join(llm.stream(messages, **GREEDY))
    for wrong in ([{"role": "user"}], [{"role": "user", "content": 3}]):
        with pytest.raises(pipeline.UsageError, match="'role' and 'content'"):
            llm.chat(wrong)


def test_sampling_is_by_request(llm: pipeline.LLM):
    assert len(llm.generate(PROMPTS[0], max_tokens=3).tokens) == 3
    assert len(llm.generate(PROMPTS[0]).tokens) <= QUICK["sampling.max_new_tokens"]
    whole = llm.generate(PROMPTS[0], **GREEDY).text
    stop = whole[6:9]
    stopped = llm.generate(PROMPTS[0], stop=stop, **GREEDY)
    assert (stopped.text, stopped.finish) == (whole[: whole.index(stop)], "stop")
    assert stopped == llm.generate(PROMPTS[0], stop=["never there", stop], **GREEDY)
    drawn = {llm.generate(PROMPTS[0], temperature=1.5, seed=seed).text for seed in range(4)}
    assert len(drawn) > 1


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"max_tokens": -1}, "max_tokens must be"),
        ({"tempreture": 1}, "sampling parameter must be .*got 'tempreture'"),
        ({"stop": ""}, "stop must be"),
        ({"stop": [3]}, "stop must be"),
    ],
)
def test_sampling_that_is_refused(llm: pipeline.LLM, sampling: dict[str, Any], message: str):
    with pytest.raises(pipeline.ConfigError, match=message):
        llm.generate("Ann has", **sampling)


def test_prompts_that_do_not_fit(llm: pipeline.LLM):
    prompt = "Ann has 3 apples. " * 400
    with pytest.raises(pipeline.UsageError, match="a prompt must have 1 to"):
        llm.generate(["Ann has", prompt])
    with pytest.raises(pipeline.UsageError, match="a prompt must have 1 to"):
        next(llm.stream(prompt))


def test_threads_share_it(llm: pipeline.LLM, tiny_pair: TinyPair):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: llm.generate(text, **GREEDY).tokens, PROMPTS))
    assert found == [greedy_generate(tiny_pair, text) for text in PROMPTS]


def test_an_interrupt_cancels_what_is_under_way(llm: pipeline.LLM, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.interface.llm._Request.completion", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, temperature=0, max_tokens=90)
    wait_until(lambda: llm._open.read_status().running + llm._open.read_status().waiting == 0)


def test_nothing_is_left(tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads, frozen = set(threading.enumerate()), gc.get_freeze_count()
    with make_llm(tiny_pair) as llm:
        llm.generate(PROMPTS[0], max_tokens=2)
        assert list(tmp_path.iterdir()) != []
        engine = weakref.ref(llm._open)
    llm.close()
    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []
    assert engine() is None, "the models are freed though `llm` is still there"
    assert gc.get_freeze_count() <= frozen
    for use in (lambda: llm.generate("Ann has"), lambda: next(llm.stream("Ann has")), lambda: llm.chat([])):
        with pytest.raises(pipeline.UsageError, match="this one is closed"):
            use()


def test_an_engine_that_fails_is_an_error(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch):
    llm = make_llm(tiny_pair)

    monkeypatch.setattr(llm._open._loop, "until_idle", Mock(side_effect=ArithmeticError("no numbers any more")))
    wait_until(lambda: not llm._open.read_status().ready)
    with pytest.raises(pipeline.OmnidraftError, match="no numbers any more"):
        llm.generate(PROMPTS[0])
    with pytest.raises(pipeline.RunError, match="no numbers any more"):
        llm.close()


@pytest.mark.slow
def test_a_run_keeps_its_log_and_learns(tiny_pair: TinyPair, tmp_path: Path, forked: None):
    run, learn = tmp_path / "run", {"spacing": "fixed", "interval": 2}
    expected = [greedy_generate(tiny_pair, text) for text in PROMPTS[:2]]
    with make_llm(tiny_pair, run=run, learning="live", learn=learn, publish={"enabled": False}) as llm:
        while not llm._open.read_status().drafter_version:
            assert [one.tokens for one in llm.generate(PROMPTS[:2], **GREEDY)] == expected
            time.sleep(0.05)  # the learner computes meanwhile
    assert active_children() == []
    assert_sound(run)
    assert max(row["drafter_version"] for row in select(run, "SELECT drafter_version FROM updates WHERE served")) > 0
    with pipeline.open_log(run) as log:
        assert "request-0" in log.table("prompts")["prompt_id"].to_pylist()
    with pytest.raises(pipeline.RunError, match="name another"):
        make_llm(tiny_pair, run=run)


def test_llms_that_are_refused(tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(pipeline.ConfigError, match="learning needs a run"):
        make_llm(tiny_pair, learning="live")
    with pytest.raises(pipeline.ConfigError, match=r"serve\.learn"):
        make_llm(tiny_pair, learning="sometimes")
    with pytest.raises(pipeline.ModelError, match="nowhere"):
        pipeline.LLM(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
