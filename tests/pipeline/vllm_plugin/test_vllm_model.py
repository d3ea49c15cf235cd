"""The drafter model in the engine's process, and what it learns there."""

import time
from pathlib import Path

import pytest
from fake_vllm import FakeTarget, ModelRunner, NothingDrafted, fake_config, put_vllm
from tiny_pair import TinyPair, sentences

from pipeline.vllm_plugin.engine import PluginEngine
from pipeline.vllm_plugin.proposer import OmnidraftProposer
from stages.engine.models.huggingface import load_tokenizer
from store.log.partitions import LEARNER, partition_folder
from store.query.log_reader import LogReader

MOST = 24  # tokens of a completion


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair: TinyPair, forked: None) -> None:
    put_vllm(monkeypatch)
    settings = {
        "PASS_COSTS": "[[1, 1.0], [40, 1.4]]",
        "RUN": str(tmp_path / "run"),
        "SOURCES": '["model"]',
        "DRAFTER": str(tiny_pair.drafter),
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"OMNIDRAFT_VLLM_{name}", value)


def prompts_of(pair: TinyPair, begin: int, end: int) -> list[list[int]]:
    tokenizer = load_tokenizer(str(pair.target))
    return [list(tokenizer(text[:30])["input_ids"]) for text in sentences(begin, end)]


def start(pair: TinyPair, rows: int) -> tuple[OmnidraftProposer, ModelRunner]:
    size, target = len(load_tokenizer(str(pair.target))), FakeTarget()
    proposer = OmnidraftProposer(fake_config(model=str(pair.target), size=size))
    proposer.load_model(target)
    return proposer, ModelRunner(pair.target, proposer, rows, target)


@pytest.mark.slow
def test_a_learner_of_the_engine_learns_and_is_continued(
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("OMNIDRAFT_VLLM_LEARN", "true")
    # An update comes soon, also where it would not pay.
    monkeypatch.setenv("OMNIDRAFT_VLLM_SET", '{"learn.interval" = 8, "learn.spacing" = "fixed", "learn.rate" = 1e-3}')
    proposer, runner = start(tiny_pair, 2)
    prompts = prompts_of(tiny_pair, 300, 316)
    plain = ModelRunner(tiny_pair.target, NothingDrafted(), 2)
    texts, deadline, served = plain.run(prompts, MOST), time.monotonic() + 240, 0
    assert runner.run(prompts, MOST) == texts
    while not served:
        assert runner.run(prompts[:2], MOST) == texts[:2]
        served = version_of(proposer)
        time.sleep(0.05)  # the learner computes meanwhile
        assert time.monotonic() < deadline, "an update is served"
    proposer.close()
    with LogReader([tmp_path / "run"]) as log:
        assert log.check().mismatches.num_rows == 0
        updates = log.select("SELECT * FROM updates WHERE part = 'drafter' AND served").to_pylist()
        versions = log.select("SELECT * FROM versions").to_pylist()
        (newest,) = log.select("SELECT max(drafter_version) AS newest FROM decisions").to_pylist()
    assert updates
    assert versions
    assert (tmp_path / "run" / "versions" / "000000" / "model.safetensors").is_file()
    assert (partition_folder(tmp_path / "run", LEARNER) / "checkpoint").is_dir()
    assert newest["newest"] <= max(row["drafter_version"] for row in updates)
    again, runner = start(tiny_pair, 2)
    assert version_of(again) >= served, "the next engine has the weights"
    again.close()


def version_of(proposer: OmnidraftProposer) -> int:
    engine = proposer._engine
    assert isinstance(engine, PluginEngine)
    return engine.drafter.runner.learner.drafter_version
