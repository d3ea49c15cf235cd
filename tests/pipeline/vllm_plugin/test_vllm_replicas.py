"""Data-parallel replicas: each has a run, a memory and a learner of its own."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_vllm import FakeRunner, FakeTarget, complete, fake_config, phrases, put_vllm
from test_vllm_run import MOST, PROMPTS

from pipeline.vllm_plugin.host import find_run
from pipeline.vllm_plugin.proposer import OmnidraftProposer
from store.query.log_reader import LogReader


def test_replicas_at_the_same_time_have_runs_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    put_vllm(monkeypatch)
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", "[[1, 1.0], [40, 1.4]]")
    monkeypatch.setenv("OMNIDRAFT_VLLM_RUN", str(tmp_path / "run"))
    proposers = [OmnidraftProposer(fake_config(replica=number)) for number in range(2)]
    for proposer, prompts in zip(proposers, (PROMPTS[:5], PROMPTS[5:]), strict=True):
        target = FakeTarget()
        proposer.load_model(target)
        texts = FakeRunner(proposer, rows=4, module=target).run(prompts, MOST)
        assert texts == [complete(phrases, prompt, MOST) for prompt in prompts]
    for proposer in proposers:
        proposer.close()
    for name, count in (("run", 5), ("run-1", len(PROMPTS) - 5)):
        with LogReader([tmp_path / name]) as log:
            assert log.check().mismatches.num_rows == 0
            rows = log.select('SELECT "offset" FROM prompts ORDER BY "offset"').to_pylist()
        assert [row["offset"] for row in rows] == list(range(count))


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({}, "chat"),
        ({"data_parallel_index": 3, "data_parallel_rank": 0, "data_parallel_rank_local": None}, "chat-3"),
        ({"data_parallel_index": 3, "data_parallel_rank_local": 1}, "chat-1"),
        ({"data_parallel_index": 3, "data_parallel_rank_local": 0}, "chat"),
    ],
)
def test_the_run_of_a_replica_is_named_by_its_number_on_this_machine(parallel: dict[str, int], name: str):
    assert find_run(Path("runs/chat"), SimpleNamespace(**parallel)) == Path("runs", name)
    assert find_run(None, SimpleNamespace(**parallel)) is None
