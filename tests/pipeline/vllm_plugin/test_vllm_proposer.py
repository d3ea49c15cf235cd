"""The proposer against a fake of vLLM: settings, versions, and what is not drafted."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_vllm import (
    COSTS,
    MOST,
    FakeRunner,
    NothingDrafted,
    Wishes,
    complete,
    fake_config,
    make_prompts,
    phrases,
    put_vllm,
)
from places import ROOT

from pipeline.vllm_plugin.proposer import OmnidraftProposer, wrap_runner
from pipeline.vllm_plugin.sequences import RowRequest
from pipeline.vllm_plugin.versions import check_version
from store.errors import ConfigError


@pytest.fixture
def proposer(monkeypatch: pytest.MonkeyPatch) -> OmnidraftProposer:
    put_vllm(monkeypatch)
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", COSTS)
    made = OmnidraftProposer(fake_config())
    made.load_model(object())
    return made


def test_drafts_end_before_the_longest_text(proposer: OmnidraftProposer, monkeypatch: pytest.MonkeyPatch):
    proposer = OmnidraftProposer(fake_config(longest=40))
    runner = FakeRunner(proposer, lambda tokens: 3 + len(tokens) % 2, longest=40)  # asserts it at each draft
    runner.run([[1, 2]], 37)
    assert max(map(len, runner.drafts)) == 4


def test_only_the_first_tensor_parallel_rank_drafts(proposer: OmnidraftProposer):
    runner = FakeRunner(OmnidraftProposer(fake_config(rank=1, tensor_parallel=2)))
    runner.run(make_prompts(5), MOST)
    assert not any(runner.drafts)


@pytest.mark.parametrize(
    ("device", "temperature", "drafts"), [("cpu", 0.7, False), ("cpu", 0.0, True), ("cuda", 0.7, True)]
)
def test_nothing_is_drafted_where_that_would_change_the_distribution(
    monkeypatch: pytest.MonkeyPatch, device: str, temperature: float, drafts: bool
):
    put_vllm(monkeypatch)
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", COSTS)
    runner = FakeRunner(OmnidraftProposer(fake_config(device=device)), rows=2, temperature=temperature)
    runner.run(make_prompts(10), MOST)
    assert any(runner.drafts) == drafts


def test_one_request_at_a_temperature_is_enough_also_if_it_waits(proposer: OmnidraftProposer):
    def state(temperature: float) -> SimpleNamespace:
        return SimpleNamespace(num_prompt_tokens=3, sampling_params=Wishes(5, temperature))

    for others, greedy in ((0.0, True), (0.5, False)):
        requests = {"a": state(0.0), "b": state(others)}
        runner = SimpleNamespace(requests=requests, input_batch=SimpleNamespace(req_ids=["a"]))
        found = proposer.read_requests(runner, 1)
        assert found == ([RowRequest("a", 8)], {"a", "b"}, greedy)


def test_a_request_that_ignores_the_end_of_sequence_is_drafted_for_after_it(monkeypatch: pytest.MonkeyPatch):
    put_vllm(monkeypatch)
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", COSTS)
    runner = FakeRunner(OmnidraftProposer(fake_config()), lambda text: [5, 6, 0][len(text) % 3], ignore_eos=True)
    runner.run([[1, 2]], MOST)
    assert runner.passes < MOST / 2


def test_the_runner_is_wrapped_once_and_other_proposers_are_not_affected(monkeypatch: pytest.MonkeyPatch):
    put_vllm(monkeypatch)
    before = FakeRunner.propose_draft_token_ids
    wrap_runner()
    wrapped = FakeRunner.propose_draft_token_ids
    wrap_runner()
    assert before is not wrapped is FakeRunner.propose_draft_token_ids
    (prompt,) = make_prompts(1)
    assert FakeRunner(NothingDrafted()).run([prompt], MOST) == [complete(phrases, prompt, MOST)]


def test_the_extra_requires_the_versions_that_are_not_refused():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["vllm"] == ["vllm>=0.32,<0.34"]
    for version in ("0.32.0", "0.32.5.post1", "0.33.0"):
        check_version(version)


def test_a_file_and_variables_set_it_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    put_vllm(monkeypatch)
    (tmp_path / "settings.toml").write_text('sources = ["own"]\norder = 3\n')
    monkeypatch.setenv("OMNIDRAFT_VLLM_CONFIG", str(tmp_path / "settings.toml"))
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", "[[1, 1.0], [2, 9.0]]")
    runner = FakeRunner(OmnidraftProposer(fake_config()))
    runner.run(make_prompts(5), MOST)
    assert not any(runner.drafts), "a token more costs more than it can bring"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ORDER", "9", "order: Input should be less than or equal to 8"),
        ("ORDR", "3", "ordr: .* There are: sources, memory_bytes, order, pass_costs, drafting_cost, run"),
        ("DRAFTING_COST", "0.1", "drafting_cost needs pass_costs"),
        ("SOURCES", "own,memry", "sources.1: Input should be .own., .memory. or .model."),
        ("CONFIG", "missing.toml", "must name a file that can be read"),
    ],
)
def test_mistakes_in_settings_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str):
    put_vllm(monkeypatch)
    monkeypatch.setenv(f"OMNIDRAFT_VLLM_{name}", value)
    with pytest.raises(ConfigError, match=message):
        OmnidraftProposer(fake_config())
