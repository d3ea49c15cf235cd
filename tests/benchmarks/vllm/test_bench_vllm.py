"""The benchmark of the plugin: its engine over a stub of vLLM, its arms, and its table."""

import json
from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner

from benchmarks.vllm.__main__ import app, choose_arms, parse_batches, parse_engine_options, read_prompts, run_rounds
from benchmarks.vllm.arms import ARMS, OURS, ArmRequest, export_drafter
from benchmarks.vllm.engine import EngineSpec, RoundRequest, RoundResult
from benchmarks.vllm.report import HEADS, ArmRounds, make_json, make_table
from benchmarks.vllm.worker import EngineWorker
from pipeline.models.catalog import path_of
from pipeline.vllm_plugin.proposer import OmnidraftProposer
from pipeline.vllm_plugin.settings import read_settings
from store.errors import UsageError

# A request emits the numbers after its prompt's last token: one per step, and `drafts` more.
STUB = """
from types import SimpleNamespace as Made

class SamplingParams:
    def __init__(self, temperature, max_tokens):
        assert temperature == 0
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, speculative_config, max_num_seqs, disable_log_stats):
        if model == "missing":
            raise OSError("there is no such model")
        print("a message of vLLM")
        self.llm_engine, self.most, self.running = self, max_num_seqs, {}
        self.drafts, self.counts = (speculative_config or {}).get("num_speculative_tokens", 0), [0, 0]

    def get_tokenizer(self):
        return Made(encode=lambda text: [len(text)])

    def add_request(self, name, prompt, sampling):
        self.running[name] = [prompt["prompt_token_ids"][-1], [], sampling.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        outputs = []
        for name, (last, text, most) in list(self.running.items())[:self.most]:
            for _ in range(min(1 + self.drafts, most - len(text))):
                text.append(last + len(text) + 1)
            self.counts[0] += self.drafts
            self.counts[1] += self.drafts
            outputs.append(Made(request_id=name, outputs=[Made(token_ids=text)]))
            if len(text) == most:
                del self.running[name]
        GPUModelRunner().propose_draft_token_ids()
        return outputs

    def get_metrics(self):
        names = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
        return [Made(name=name, value=count) for name, count in zip(names, self.counts)]
"""
RUNNER = """
class GPUModelRunner:
    def propose_draft_token_ids(self):
        pass
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    worker = tmp_path / "stub" / "vllm" / "v1" / "worker"
    worker.mkdir(parents=True)
    for folder in (worker, worker.parent):
        (folder / "__init__.py").touch()
    (worker.parent.parent / "__init__.py").write_text(STUB, encoding="utf-8")
    (worker / "gpu_model_runner.py").write_text(RUNNER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{worker.parent.parent.parent}:{ROOT}")
    return tmp_path


def make_result(*texts: list[int], passes: int = 4, seconds: float = 2.0) -> RoundResult:
    return RoundResult(texts, passes, passes, 6, 3, seconds, [0.1] * 99 + [0.5], (0.1, 0.2))


def test_help_shows_no_type_of_options_without_a_value():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"}).output
    assert "--no-chat" in shown
    assert "<bool>" not in shown


def test_an_engine_answers_rounds_step_by_step(stub: Path):
    spec = EngineSpec("any", 2, {"num_speculative_tokens": 1})
    with EngineWorker(spec, {}, stub / "messages") as worker:
        worker.wait_until_ready()
        first = worker.complete(RoundRequest([[5], [7], [9]], 4))
        second = worker.complete(RoundRequest(["four", "and five"], 3, arrivals=[0, 2]))
    assert first.texts == [[6, 7, 8, 9], [8, 9, 10, 11], [10, 11, 12, 13]]
    assert (first.emitted, first.passes, first.steps, first.drafted, first.accepted) == (12, 6, 4, 6, 6)
    assert len(first.gaps) == 3
    assert first.seconds > first.proposing[1] >= 0
    assert second.texts == [[5, 6, 7], [9, 10, 11]]
    assert second.steps == 4, "the second arrived when the first had ended"
    assert "a message of vLLM" in (stub / "messages").read_text(encoding="utf-8")


def test_an_engine_that_does_not_start_is_an_error(stub: Path):
    missing = EngineSpec("missing", 1)
    with (
        EngineWorker(missing, {}, stub / "messages") as worker,
        pytest.raises(UsageError, match="there is no such model"),
    ):
        worker.wait_until_ready()


def test_arms_answer_the_same_rounds(stub: Path):
    request = ArmRequest(3, 2, "builtin:drafter-4m", stub)
    rounds = [["warm"], ["one", "three"], ["seven"]]
    found = run_rounds("any", 2, request, ["plain", "ngram"], {}, rounds, 4, chat=False)
    *_, results = found
    assert [len(arm.rounds) for arm in results.values()] == [2, 2]
    assert results["ngram"].count_equal(results["plain"]) == 3
    assert results["ngram"].tokens_per_pass == 4
    assert results["plain"].tokens_per_pass == 1


def test_every_arm_is_configured(tmp_path: Path):
    request = ArmRequest(8, 4, "builtin:drafter-4m", tmp_path)
    arms = {name: make(request) for name, make in ARMS.items()}
    assert arms["plain"].speculative is None
    drafter = Path(arms["draft-model"].speculative["model"])
    names = {file.name for file in path_of("drafter-4m").iterdir()}
    assert {file.name for file in drafter.iterdir()} == names - {"head.safetensors"}
    assert export_drafter("owner/drafter", tmp_path / "other") == "owner/drafter"
    for name in OURS:
        assert arms[name].speculative["model"] == f"{OmnidraftProposer.__module__}.{OmnidraftProposer.__name__}"
        assert arms[name].speculative["num_speculative_tokens"] == 8
        settings = read_settings(arms[name].environment())
        assert settings.learn == (name == "learning")
        assert ("model" in settings.sources) == (name not in {"memory", "memory-flat"})
        assert bool(settings.pass_costs) == name.endswith("-flat")
    with pytest.raises(UsageError, match="of plain"):
        choose_arms("plain,other")


@pytest.mark.parametrize("wrong", ["", "0", "-1", "1,", "1,two"])
def test_a_wrong_batch_is_a_mistake_of_the_user(wrong: str):
    with pytest.raises(UsageError, match="--batch must be positive"):
        parse_batches(wrong)


@pytest.mark.parametrize("wrong", ["", "{", "[1]", "3"])
def test_wrong_engine_options_are_a_mistake_of_the_user(wrong: str):
    with pytest.raises(UsageError, match="--engine must be a JSON object"):
        parse_engine_options(wrong)


def test_prompts_are_those_of_the_sources(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": str(number), "kind": number % 2}) for number in range(9)))
    assert read_prompts([str(file)], [], 3) == ["0", "1", "2"]
    with pytest.raises(UsageError, match="must have 10 prompts, got 9"):
        read_prompts([str(file)], [], 10)


def test_the_table_compares_with_plain():
    plain = ArmRounds([make_result([1, 2, 3, 4]), make_result([5, 6])])
    ours = ArmRounds([make_result([1, 2, 3, 4], passes=2, seconds=1.0), make_result([5, 7], passes=1, seconds=1.0)])
    table = make_table(4, {"plain": plain, "ours": ours})
    assert table.heads == HEADS
    cells = dict(zip(HEADS, table.rows[1], strict=True))
    assert cells["tokens per pass"] == "2.00"
    assert cells["tokens/s"] == "3.0"
    assert cells["to plain"] == "2.00"
    assert cells["p99 gap, ms"] == "500"
    assert cells["proposer, ms"] == "66.67"
    assert cells["of the pass"] == "12.5%"
    assert cells["equal texts"] == "1 of 2"
    read = json.loads(json.dumps(make_json(4, {"ours": ours})))
    assert ArmRounds([RoundResult.from_json(one) for one in read["arms"]["ours"]]).tokens_per_pass == 2
