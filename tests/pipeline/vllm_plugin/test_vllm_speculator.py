"""The speculator of vLLM's second runner against a fake of it, and what lets vLLM choose it."""

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_vllm import COSTS, END, MOST, FakeTarget, SecondRunner, complete, fake_config, make_prompts, phrases, put_vllm
from test_vllm_run import read_requests

from pipeline.vllm_plugin import register, speculator
from pipeline.vllm_plugin.register import METHOD, PROPOSER
from pipeline.vllm_plugin.sequences import RowRequest
from pipeline.vllm_plugin.speculator import OmnidraftSpeculator, _RequestText, build_speculator
from store.errors import UsageError
from store.query.log_reader import LogReader


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    put_vllm(monkeypatch)
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", COSTS)


def test_the_log_has_every_request_and_the_probability_of_each_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("OMNIDRAFT_VLLM_RUN", str(tmp_path / "run"))
    prompts = make_prompts(12)
    runner = SecondRunner(fake_config(), rows=4, chunk=20, module=FakeTarget())
    runner.run(prompts, MOST, preempt_every=9)
    assert runner.speculator is not None
    runner.speculator.close()
    expected = [complete(phrases, prompt, MOST) for prompt in prompts]
    assert read_requests(tmp_path / "run") == {
        f"request-1-{number}": ("stop" if text[-1] == END else "length", text) for number, text in enumerate(expected)
    }
    with LogReader([tmp_path / "run"]) as log:
        accepted = log.select("SELECT target_levels FROM decisions WHERE outcome = 'accepted'").to_pylist()
    assert len(accepted) > 100
    assert all(row["target_levels"][0] > 0.8 for row in accepted)


def test_drafts_end_at_the_number_of_tokens_that_vllm_takes_in_this_pass():
    made = OmnidraftSpeculator(fake_config(), torch.device("cpu"), Mock())
    made._draft = lambda rows, step: [[5, 6, 7], [8]]  # type: ignore[method-assign]
    batch = SimpleNamespace(num_reqs=2, req_ids=["a", "b"])
    found = made.propose(batch, {}, {}, None, None, torch.ones(2), num_speculative_tokens=2)
    assert found.tolist() == [[5, 6, 0, 0], [8, 0, 0, 0]]
    told = SimpleNamespace(req_ids=["b", "a", "c"], draft_token_ids=[[-1, -1], [-1, -1], [-1, -1]])
    assert made.trim(told).draft_token_ids == [[-1], [-1, -1], []]
    assert made.trim(None) is None


def test_a_request_without_tokens_is_not_drafted_for(caplog: pytest.LogCaptureFixture):
    runner = SecondRunner(fake_config())
    assert runner.speculator is not None
    receive = runner.speculator.receive_schedule

    def receive_embeddings(scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            new.prompt_token_ids = new.prefill_token_ids = None
        receive(scheduled)

    runner.speculator.receive_schedule = receive_embeddings  # type: ignore[method-assign]
    prompts = make_prompts(2)
    assert runner.run(prompts, MOST) == [complete(phrases, prompt, MOST) for prompt in prompts]
    assert not any(runner.drafts)
    assert not [one for one in caplog.records if one.levelno > logging.INFO]


def test_a_text_that_is_not_vllms_is_an_error():
    with pytest.raises(TypeError, match="a text of 3 tokens where vLLM has 9"):
        _RequestText([1, 2], RowRequest("a", 9), 4).extend([3], 9)


def test_sampled_requests_are_drafted_for_on_the_cpu_too():
    runner = SecondRunner(fake_config(device="cpu"), rows=2, temperature=0.7)
    runner.run(make_prompts(10), MOST)
    assert any(runner.drafts)


def test_ranks_without_an_engine_receive_the_drafts_of_the_first(monkeypatch: pytest.MonkeyPatch):
    sent: list[torch.Tensor] = []

    def broadcast(drafts: torch.Tensor, src: int) -> None:
        assert src == 0
        sent.append(drafts.clone())
        drafts.fill_(9)

    distributed = ModuleType("vllm.distributed")
    distributed.__dict__["get_tp_group"] = lambda: SimpleNamespace(broadcast=broadcast)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    made = OmnidraftSpeculator(fake_config(rank=1, tensor_parallel=2), torch.device("cpu"), Mock())
    batch = SimpleNamespace(num_reqs=1, req_ids=["a"])
    assert made.propose(batch, {}, {}, None, None, torch.ones(1)).tolist() == [[9] * 4]
    assert made.propose(batch, {}, {}, None, None, torch.ones(1), dummy_run=True).tolist() == [[9] * 4]
    assert [one.tolist() for one in sent] == [[[0] * 4]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scheduler_config": {"async_scheduling": True}}, "start vLLM with --no-async-scheduling"),
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "cannot draft with pipeline parallelism"),
    ],
)
def test_what_it_cannot_do_is_refused(changed: dict[str, dict[str, Any]], message: str):
    config = fake_config()
    for part, values in changed.items():
        vars(getattr(config, part)).update(values)
    with pytest.raises(UsageError, match=message):
        OmnidraftSpeculator(config, torch.device("cpu"), Mock())


class Runner:
    """The methods of vLLM's second runner that are wrapped."""

    def __init__(self, speculator: object) -> None:
        self.speculator, self.model = speculator, object()

    def load_model(self, quick: bool = False) -> None:
        self.loaded = quick

    def execute_model(self, scheduled: str, dummy_run: bool = False) -> str:
        return f"executed {scheduled}"

    def take_draft_token_ids(self) -> Any:
        return SimpleNamespace(req_ids=["a"], draft_token_ids=[[-1, -1]])


def test_the_runner_shows_its_speculator_what_it_needs_and_others_nothing(monkeypatch: pytest.MonkeyPatch):
    module, own = ModuleType(speculator.RUNNER), type("Runner", (Runner,), {})
    module.__dict__["GPUModelRunner"] = own
    monkeypatch.setitem(sys.modules, speculator.RUNNER, module)
    made = build_speculator(fake_config(), torch.device("cpu"), Mock())
    build_speculator(fake_config(), torch.device("cpu"), Mock())
    shown = {name: Mock() for name in ("load_model", "receive_schedule")}
    for name, method in shown.items():
        setattr(made, name, method)
    runner, other = own(made), own(object())
    for one in (runner, other):
        one.load_model(quick=True)
        assert one.loaded
        assert one.execute_model("a") == "executed a"
        assert one.execute_model("b", dummy_run=True) == "executed b"
    shown["load_model"].assert_called_once_with(runner.model)
    shown["receive_schedule"].assert_called_once_with("a")
    assert runner.take_draft_token_ids().draft_token_ids == [[]]
    assert other.take_draft_token_ids().draft_token_ids == [[-1, -1]]


def put_config(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> tuple[Any, ModuleType]:
    """Let `register` find vLLM's configuration and its choice of a speculator."""
    put_vllm(monkeypatch, version)

    class VllmConfig:
        def __init__(self, model: str, asynchronous: bool | None = None) -> None:
            self.speculative_config = SimpleNamespace(method=METHOD, model=model)
            self.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)

        def _get_v2_model_runner_unsupported_features(self) -> list[str]:
            return ["pipeline parallelism", f"speculative method '{METHOD}'"]

    chosen = ModuleType("vllm.v1.worker.gpu.spec_decode")
    chosen.__dict__["init_speculator"] = lambda vllm_config, *given: given
    config = ModuleType("vllm.config")
    config.__dict__["VllmConfig"] = VllmConfig
    for name in ("vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, chosen.__name__, chosen)
    monkeypatch.setattr(sys.modules["vllm.v1.worker.gpu"], "spec_decode", chosen, raising=False)
    return VllmConfig, chosen


def test_the_second_runner_takes_the_plugin_and_refuses_other_classes(monkeypatch: pytest.MonkeyPatch):
    config, choice = put_config(monkeypatch)
    register.register()
    register.register()
    ours, other, eager = config(PROPOSER), config("another.Class"), config(PROPOSER, asynchronous=True)
    assert ours._get_v2_model_runner_unsupported_features() == ["pipeline parallelism"]
    assert len(other._get_v2_model_runner_unsupported_features()) == 2
    assert eager._get_v2_model_runner_unsupported_features() == ["pipeline parallelism"]
    scheduling = [one.scheduler_config.async_scheduling for one in (ours, other, eager)]
    assert scheduling == [False, None, True], "what the user chose is refused later, with a reason"
    build = Mock()
    monkeypatch.setattr(speculator, "build_speculator", build)
    assert choice.init_speculator(other, 1, 2) == (1, 2)
    assert choice.init_speculator(ours, 1, 2) is build.return_value
    build.assert_called_once_with(ours, 1, 2)


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0"])
def test_other_versions_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, version: str):
    config, choice = put_config(monkeypatch, version)
    before = choice.init_speculator
    register.register()
    assert choice.init_speculator is before
    assert len(config(PROPOSER)._get_v2_model_runner_unsupported_features()) == 2


def test_a_vllm_without_a_second_runner_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    config, _ = put_config(monkeypatch)
    monkeypatch.delattr(config, "_get_v2_model_runner_unsupported_features")
    register.register()
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    register.register()
