"""Both of vLLM's runners, as fakes: the same texts in fewer passes, and an error ends nothing but the drafting."""

import logging
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from fake_vllm import (
    COSTS,
    MOST,
    FakeRunner,
    NothingDrafted,
    SecondRunner,
    complete,
    fake_config,
    make_prompts,
    phrases,
    put_vllm,
)

from pipeline.vllm_plugin.proposer import OmnidraftProposer

Make = Callable[[int], FakeRunner]


@pytest.fixture(
    params=[
        lambda rows: FakeRunner(OmnidraftProposer(fake_config()), rows=rows),
        lambda rows: SecondRunner(fake_config(), rows=rows),
    ],
    ids=["first", "second"],
)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    put_vllm(monkeypatch)
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", COSTS)
    found: Make = request.param
    return found


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("preempt_every", [0, 40])
def test_texts_are_those_without_drafts_in_fewer_passes(make: Make, rows: int, preempt_every: int):
    runner, plain, prompts = make(rows), FakeRunner(NothingDrafted(), rows=rows), make_prompts(40)
    texts = runner.run([*prompts, *prompts[:3]], MOST, preempt_every)
    assert texts == plain.run([*prompts, *prompts[:3]], MOST, preempt_every)
    assert texts[:40] == [complete(phrases, prompt, MOST) for prompt in prompts]
    assert runner.passes < 0.7 * plain.passes
    assert {len(draft) for draft in runner.drafts} == {0, 1, 2, 3, 4}, "as many as pay, for each request"


def test_an_error_ends_the_drafting_and_not_vllm(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    prompts, runner = make_prompts(6), make(2)
    runner.run(prompts[:3], MOST)
    drafted = len([draft for draft in runner.drafts if draft])
    monkeypatch.setattr("pipeline.vllm_plugin.engine.TextMemory.grow", Mock(side_effect=ZeroDivisionError))
    assert runner.run(prompts, MOST) == [complete(phrases, prompt, MOST) for prompt in prompts]
    assert len([draft for draft in runner.drafts if draft]) == drafted > 0
    assert [one.levelname for one in caplog.records if one.levelno > logging.INFO] == ["ERROR"]
    assert "ZeroDivisionError" in caplog.text
