"""Replicas that share a run: one learner, one log, and what the memory of one learned is drafted by the others."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_vllm import FakeRunner, FakeTarget, complete, fake_config, phrases, put_vllm
from places import ROOT
from serving_tiny import wait_until
from test_vllm_run import MOST, PROMPTS

from pipeline.vllm_plugin.engine import PluginEngine
from pipeline.vllm_plugin.proposer import OmnidraftProposer, find_replica
from pipeline.vllm_plugin.recorded import MOST_REPLICAS, REPLICA_OFFSETS
from stages.choose import ChooseDraft
from store.errors import RunError, UsageError
from store.query.log_reader import LogReader

TEXTS = [complete(phrases, prompt, MOST) for prompt in PROMPTS]
OTHER = """
import sys, time, pytest, fake_vllm, test_vllm_run
from pipeline.vllm_plugin.proposer import OmnidraftProposer
fake_vllm.put_vllm(pytest.MonkeyPatch())
proposer = OmnidraftProposer(fake_vllm.fake_config(replica=1))
runner = fake_vllm.FakeRunner(proposer, rows=4)
for line in sys.stdin:
    runner.run(test_vllm_run.PROMPTS, test_vllm_run.MOST)
    runner.run([[1, 2]], 1)  # a pass after the last end
    print(runner.passes, flush=True)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_vllm(monkeypatch)
    folders = [ROOT, ROOT / "tests" / "support", Path(__file__).parent]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", "[[1, 1.0], [40, 1.4]]")
    monkeypatch.setenv("OMNIDRAFT_VLLM_COMMIT_SECONDS", "0.2")
    monkeypatch.setenv("OMNIDRAFT_VLLM_RUN", str(tmp_path / "run"))


def start(replica: int = 0) -> tuple[OmnidraftProposer, FakeRunner]:
    proposer, target = OmnidraftProposer(fake_config(replica=replica)), FakeTarget()
    proposer.load_model(target)
    return proposer, FakeRunner(proposer, rows=4, module=target)


def count_contexts(proposer: OmnidraftProposer) -> int:
    """Contexts in the memory, after the engine looked for what others learned."""
    engine = proposer._engine
    assert isinstance(engine, PluginEngine)
    engine.commit_if_due()
    choose = engine.drafter.runner.stages.decode
    assert isinstance(choose, ChooseDraft)
    assert choose.memory.table is not None
    return len(choose.memory.table)


def logged_offsets(run: Path) -> list[int]:
    with LogReader([run]) as log:
        assert log.check().mismatches.num_rows == log.check().miscounts.num_rows == 0
        return [row["offset"] for row in log.select('SELECT "offset" FROM prompts ORDER BY "offset"').to_pylist()]


def test_a_replica_drafts_what_another_has_learned_and_outlives_it(tmp_path: Path):
    first, runner = start()
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdin=-1, stdout=-1, text=True)
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write("go\n")
    other.stdin.flush()
    passes = int(other.stdout.readline())
    wait_until(lambda: count_contexts(first) > 100)
    assert runner.run(PROMPTS, MOST) == TEXTS
    assert runner.passes < 0.7 * passes
    wait_until(lambda: len(logged_offsets(tmp_path / "run")) >= 2 * len(PROMPTS))
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert runner.run(PROMPTS, MOST) == TEXTS
    second, returned = start(1)
    assert count_contexts(second) > 100, "its own, of the last commit"
    assert returned.run(PROMPTS, MOST) == TEXTS
    for proposer in (first, second):
        proposer.close()
    of_second = [offset - REPLICA_OFFSETS for offset in logged_offsets(tmp_path / "run") if offset >= REPLICA_OFFSETS]
    assert len(of_second) >= 2 * len(PROMPTS)
    assert len(logged_offsets(tmp_path / "run")) - len(of_second) == 2 * len(PROMPTS)


def test_the_offsets_of_the_last_replica_can_be_logged(tmp_path: Path):
    first, _ = start()
    last, runner = start(MOST_REPLICAS - 1)
    assert runner.run(PROMPTS[:2], MOST) == TEXTS[:2]
    runner.run([[1, 2]], 1)  # a pass after the last end
    for proposer in (first, last):
        proposer.close()
    begin = (MOST_REPLICAS - 1) * REPLICA_OFFSETS
    assert logged_offsets(tmp_path / "run")[:2] == [begin, begin + 1]
    with pytest.raises(UsageError, match="by 20 replicas at most, got the number 20"):
        start(MOST_REPLICAS)


def test_a_replica_of_another_target_is_refused():
    first, _ = start()
    with pytest.raises(RunError, match="must be the run of another, but is that of fake"):
        OmnidraftProposer(fake_config(replica=1, model="another"))
    first.close()


def test_a_replica_waits_for_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.vllm_plugin.recorded.RUN_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(RunError, match="must be begun by the replica with the number 0"):
        start(1)
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize(
    ("setting", "parallel", "number"),
    [
        (None, {}, 0),
        (None, {"data_parallel_index": 3, "data_parallel_rank": 0, "data_parallel_rank_local": None}, 3),
        (None, {"data_parallel_index": 3, "data_parallel_rank_local": 1}, 1),
        (2, {"data_parallel_index": 3, "data_parallel_rank_local": 1}, 2),
    ],
)
def test_the_number_of_a_replica_is_that_of_this_machine(setting: int | None, parallel: dict[str, int], number: int):
    assert find_replica(setting, SimpleNamespace(**parallel)) == number
