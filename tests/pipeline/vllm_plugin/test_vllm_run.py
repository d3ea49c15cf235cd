"""The run of an engine: its log, its memory, and what remains of both after a kill."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm_python
from fake_vllm import END, FakeRunner, FakeTarget, complete, fake_config, phrases, put_vllm
from places import ROOT

from pipeline.run.stored_memory import read_memories
from pipeline.vllm_plugin.proposer import OmnidraftProposer
from store.errors import RunError
from store.log.manifest import RunKind, read_manifest
from store.query.log_reader import LogReader

MOST = 50  # tokens of a completion
TEXTS = 'SELECT "offset", list(token_id ORDER BY position) AS ids FROM tokens GROUP BY ALL'
PROMPTS = [[1 + (7 * number + place) % 39 for place in range(1 + number % 9)] for number in range(12)]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_vllm(monkeypatch)
    monkeypatch.setenv("OMNIDRAFT_VLLM_PASS_COSTS", "[[1, 1.0], [40, 1.4]]")
    monkeypatch.setenv("OMNIDRAFT_VLLM_RUN", str(tmp_path / "run"))


def serve(prompts: list[list[int]], rows: int = 4, *, logits: bool = True) -> FakeRunner:
    """Run an engine from its start to its end."""
    proposer, target = OmnidraftProposer(fake_config()), FakeTarget()
    proposer.load_model(target)
    runner = FakeRunner(proposer, rows=rows, module=target if logits else None)
    assert runner.run(prompts, MOST) == [complete(phrases, prompt, MOST) for prompt in prompts]
    proposer.close()
    return runner


@pytest.mark.parametrize("rows", [1, 4])
def test_the_log_has_every_token_and_its_probability(tmp_path: Path, rows: int):
    serve(PROMPTS, rows)
    with LogReader([tmp_path / "run"]) as log:
        found = log.check()
        texts = log.select(TEXTS).to_pylist()
        prompts = log.select("SELECT * FROM prompts").to_pylist()
        decisions = log.select("SELECT * FROM decisions").to_pylist()
    assert found.mismatches.num_rows == found.miscounts.num_rows == 0
    assert found.judged > 100
    expected = [complete(phrases, prompt, MOST) for prompt in PROMPTS]
    logged = sorted(row["ids"][:MOST] for row in texts)
    assert logged == sorted(expected), "a request that ends by its length may have more tokens in the log"
    assert {row["prompt_text"] + row["completion_text"] for row in prompts} == {""}
    assert {row["emitted_bytes"] for row in decisions} == {None}
    accepted = [row for row in decisions if row["outcome"] == "accepted"]
    assert {row["uniform"] for row in decisions} == {None}
    assert all(row["target_levels"][0] > 0.8 for row in accepted)
    rejected = [row["target_levels"][0] for row in decisions if row["outcome"] == "rejected"]
    assert rejected
    assert max(rejected) < 0.1
    assert read_manifest(tmp_path / "run").kind is RunKind.ENGINE


def read_requests(run: Path) -> dict[str, tuple[str, list[int]]]:
    """The logged requests by id: how each ended, and its tokens."""
    query = f'SELECT prompt_id, finish, ids FROM ({TEXTS}) JOIN prompts USING ("offset") ORDER BY "offset"'
    with LogReader([run]) as log:
        assert log.check().mismatches.num_rows == 0
        rows = log.select(query).to_pylist()
    found = {row["prompt_id"]: (row["finish"], row["ids"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_with_ids_a_preempted_request_stays_one_and_equal_ones_are_distinguished(tmp_path: Path):
    proposer, prompts = OmnidraftProposer(fake_config()), [*PROMPTS, *PROMPTS[:3]]
    runner = FakeRunner(proposer, rows=4, chunk=20)
    runner.run(prompts, MOST, preempt_every=9)
    proposer.close()
    expected = [complete(phrases, prompt, MOST) for prompt in prompts]
    assert read_requests(tmp_path / "run") == {
        f"request-1-{number}": ("stop" if text[-1] == END else "length", text) for number, text in enumerate(expected)
    }


@pytest.mark.parametrize(
    ("wishes", "finish", "text"),
    [
        ({}, "stop", [8, 9, END]),
        ({"ignore_eos": True}, "length", [8, 9, END, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"stop_token_ids": [9]}, "stop", [8, 9]),
        ({"stop_token_ids": [3], "ignore_eos": True}, "stop", [8, 9, END, 1, 2, 3]),
    ],
)
def test_with_ids_a_request_ends_by_its_parameters(
    tmp_path: Path, wishes: dict[str, Any], finish: str, text: list[int]
):
    proposer = OmnidraftProposer(fake_config())
    runner = FakeRunner(proposer, lambda tokens: (tokens[-1] + 1) % 10, **wishes)
    assert runner.run([[7]], 12) == [text]
    proposer.close()
    assert read_requests(tmp_path / "run") == {"request-1-0": (finish, text)}


def test_the_check_finds_a_token_that_could_not_be_emitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def other(tokens: list[int]) -> int:
        return 3

    proposer, target = OmnidraftProposer(fake_config()), FakeTarget()
    proposer.load_model(target)
    runner = FakeRunner(proposer, module=target)
    monkeypatch.setattr(runner, "_add_line", lambda text: runner._lines.append([200.0 * (n == 2) for n in range(40)]))
    runner._target = other
    runner.run([[1, 2]], 30)
    proposer.close()
    with LogReader([tmp_path / "run"]) as log:
        problems = set(log.check().mismatches["problem"].to_pylist())
    assert problems == {"a token must not be accepted where its probability is 0"}


def test_the_next_engine_has_the_memory_and_continues_the_log(tmp_path: Path):
    first = serve(PROMPTS)
    (memory,) = read_memories(tmp_path / "run")
    assert len(memory.table) > 100
    again = serve(PROMPTS)
    assert again.passes < 0.7 * first.passes
    with LogReader([tmp_path / "run"]) as log:
        offsets = [row["offset"] for row in log.select('SELECT "offset" FROM prompts ORDER BY "offset"').to_pylist()]
        assert log.check().mismatches.num_rows == 0
    assert offsets == list(range(2 * len(PROMPTS)))


def test_the_run_of_another_target_is_refused():
    serve(PROMPTS[:2])
    config = fake_config()
    config.model_config.model = "another"
    with pytest.raises(RunError, match="must be the run of another, but is that of fake"):
        OmnidraftProposer(config)


def test_what_was_saved_outlives_a_kill(tmp_path: Path):
    code = (
        "import json, sys\n"
        "import pytest, fake_vllm, test_vllm_run\n"
        "fake_vllm.put_vllm(pytest.MonkeyPatch())\n"
        "proposer = test_vllm_run.OmnidraftProposer(fake_vllm.fake_config())\n"
        "runner = fake_vllm.FakeRunner(proposer)\n"
        "for prompt in test_vllm_run.PROMPTS:\n"
        "    runner.run([prompt], test_vllm_run.MOST)\n"
        "print(runner.passes, flush=True)\n"
        "sys.stdin.read()\n"
    )
    paths = [ROOT, ROOT / "tests" / "support", Path(__file__).parent]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "OMNIDRAFT_VLLM_COMMIT_SECONDS": "0.2"}
    process = warm_python.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True, env=environment)
    assert process.stdout is not None
    passes = int(process.stdout.readline())
    manifest = tmp_path / "run" / "log" / "manifest.json"
    deadline = time.monotonic() + 60
    while sum(part["rows"] for part in json.loads(manifest.read_text())["tables"]["prompts"]) < len(PROMPTS) - 1:
        assert time.monotonic() < deadline, "the idle engine commits"
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert serve(PROMPTS, 1).passes < 0.8 * passes
    with LogReader([tmp_path / "run"]) as log:
        assert log.check().mismatches.num_rows == 0
