"""The proposer against a fake of vLLM: the same texts in fewer passes, and nothing that could end the engine."""

import random
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fake_vllm import FakeRunner, complete, fake_config, phrases, put_vllm
from places import ROOT

from pipeline.vllm_plugin.proposer import OmnidraftProposer, check_version
from store.errors import ConfigError, UsageError

MOST = 50  # tokens of a completion


def make_prompts(count: int) -> list[list[int]]:
    numbers = random.Random(5)
    return [[numbers.randrange(1, 40) for _ in range(numbers.randrange(1, 15))] for _ in range(count)]


@pytest.fixture
def proposer(monkeypatch: pytest.MonkeyPatch) -> OmnidraftProposer:
    put_vllm(monkeypatch)
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", "[[1, 1.0], [40, 1.4]]")
    made = OmnidraftProposer(fake_config())
    made.load_model(object())
    return made


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("preempt_every", [0, 40])
def test_texts_are_those_without_drafts_in_fewer_passes(proposer: OmnidraftProposer, rows: int, preempt_every: int):
    runner, prompts = FakeRunner(proposer, rows=rows), make_prompts(40)
    texts = runner.run([*prompts, *prompts[:3]], MOST, preempt_every)
    plain = FakeRunner(NothingDrafted(), rows=rows)
    assert texts == plain.run([*prompts, *prompts[:3]], MOST, preempt_every)
    assert texts[:40] == [complete(phrases, prompt, MOST) for prompt in prompts]
    assert runner.passes < 0.7 * plain.passes
    assert {len(draft) for draft in runner.drafts} == {0, 1, 2, 3, 4}


class NothingDrafted:
    def propose(self, sampled, *arguments, **named):
        return [[] for _ in sampled]


def test_drafts_end_before_the_longest_text(proposer: OmnidraftProposer, monkeypatch: pytest.MonkeyPatch):
    proposer = OmnidraftProposer(fake_config(longest=40))
    runner = FakeRunner(proposer, lambda tokens: 3 + len(tokens) % 2, longest=40)  # asserts it at each draft
    runner.run([[1, 2]], 37)
    assert max(map(len, runner.drafts)) == 4


def test_only_the_first_tensor_parallel_rank_drafts(proposer: OmnidraftProposer):
    runner = FakeRunner(OmnidraftProposer(fake_config(rank=1, tensor_parallel=2)))
    runner.run(make_prompts(5), MOST)
    assert not any(runner.drafts)


def test_an_error_ends_the_drafting_and_not_the_engine(
    proposer: OmnidraftProposer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    prompts = make_prompts(6)

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    runner = FakeRunner(proposer, rows=2)
    runner.run(prompts[:3], MOST)
    drafted = len([draft for draft in runner.drafts if draft])
    monkeypatch.setattr("pipeline.vllm_plugin.engine.TextMemory.grow", fail)
    assert runner.run(prompts, MOST) == [complete(phrases, prompt, MOST) for prompt in prompts]
    assert len([draft for draft in runner.drafts if draft]) == drafted > 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "dev"])
def test_other_versions_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch, version: str):
    put_vllm(monkeypatch, version)
    with pytest.raises(UsageError, match=f"0.32 up to, not including, 0.33; got {version}"):
        OmnidraftProposer(fake_config())


def test_the_extra_asks_for_the_versions_that_are_not_refused():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["vllm"] == ["vllm>=0.32,<0.33"]
    for version in ("0.32.0", "0.32.5.post1"):
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
        ("ORDR", "3", "ordr: .* There are: sources, memory_bytes, order, pass_costs, run"),
        ("SOURCES", "own", "must be written as in TOML"),
        ("CONFIG", "missing.toml", "must name a file that can be read"),
    ],
)
def test_mistakes_in_settings_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str):
    put_vllm(monkeypatch)
    monkeypatch.setenv(f"OMNIDRAFT_VLLM_{name}", value)
    with pytest.raises(ConfigError, match=message):
        OmnidraftProposer(fake_config())


@pytest.mark.slow
def test_the_import_pulls_no_server_and_no_libraries_that_vllm_does_not_need():
    code = (
        "import sys, pipeline.vllm_plugin.proposer\n"
        "heavy = {'fastapi', 'uvicorn', 'ray', 'mlflow', 'duckdb', 'pyarrow', 'river', 'transformers', 'vllm'}\n"
        "print(sorted(heavy & set(sys.modules)), [name for name in sys.modules if name.startswith('pipeline.serve')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"
