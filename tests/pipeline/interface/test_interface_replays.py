"""`pipeline.replay`: a run from Python, its result, its errors, and what it leaves in the process."""

import gc
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import QUICK
from tiny_pair import TinyPair

import pipeline
from pipeline.sources.stream import stream
from store.events import PromptReceived

PROMPTS = 10  # of each source
THREADS = 3


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Neither threads nor signal handlers nor another number of torch's threads."""
    threads, handlers = set(threading.enumerate()), [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    gc.collect()  # an update's thread ends with its worker, which a cycle of references may keep until here
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)  # it may be about to end
    assert set(threading.enumerate()) - threads == set()
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert torch.get_num_threads() == THREADS
    torch.set_num_threads(before)


def quick(pair: TinyPair, run: Path, **changes: Any) -> pipeline.ReplayResult:
    """A quick replay of one source that publishes nothing."""
    given = {"config": {**QUICK, "publish.enabled": False, "device": "cpu"}, "run": run, **changes}
    return pipeline.replay(given.pop("sources", pair.sums), target=pair.target, drafter=pair.drafter, **given)


def test_a_replay_has_a_typed_result(tiny_pair: TinyPair, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    result = quick(tiny_pair, tmp_path / "run", sources=[tiny_pair.sums, str(tiny_pair.more)], batch=2)
    assert result.run == tmp_path / "run"
    assert result.mlflow_uri is None
    saved = json.loads((result.run / "summary.json").read_text())
    totals = result.summary.totals
    assert totals.prompts == 2 * PROMPTS == saved["totals"]["prompts"]
    assert (totals.acceptance_rate, totals.seconds) == (saved["totals"]["acceptance_rate"], saved["totals"]["seconds"])
    assert list(result.summary.datasets) == ["sums", "more"]
    assert result.summary.datasets["more"].prompts == PROMPTS
    assert list(result.summary.targets) == [str(tiny_pair.target)]
    assert (result.summary.rejected_rows, result.summary.versions) == (0, [])
    with result.log() as log:
        (row,) = log.sql("SELECT count(*) AS prompts, sum(emitted) AS emitted FROM prompts").to_pylist()
    assert row == {"prompts": totals.prompts, "emitted": totals.emitted_tokens}
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_replay_runs_in_any_thread(tiny_pair: TinyPair, tmp_path: Path):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(quick, tiny_pair, tmp_path / name) for name in ("first", "second")]
        assert [run.result().summary.totals.prompts for run in runs] == [PROMPTS, PROMPTS]


def interrupt_after(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while so many prompts have been read."""

    def read_and_interrupt(sources: Any) -> Iterator[Any]:
        for number, event in enumerate(stream(sources)):
            if number == prompts:
                os.kill(os.getpid(), signal.SIGINT)
            assert isinstance(event, PromptReceived)
            yield event

    monkeypatch.setattr("pipeline.run.replay.stream", read_and_interrupt)


@pytest.mark.slow
def test_ctrl_c_commits_and_raises_and_the_run_resumes(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        interrupt_after(4, patch)
        with pytest.raises(KeyboardInterrupt) as raised:
            quick(tiny_pair, tmp_path / "run")
    assert raised.value.__notes__ == [
        f"what was done is committed; resume it with replay(resume={str(tmp_path / 'run')!r})"
    ]
    with pytest.raises(pipeline.ConfigError, match=r"only publish.mlflow_uri may be given, got batch, run"):
        pipeline.replay(resume=tmp_path / "run", batch=2, run="other")
    with pytest.raises(pipeline.ConfigError, match="got a config as well"):
        pipeline.replay(resume=tmp_path / "run", config={"batch": 2})
    result = pipeline.replay(resume=tmp_path / "run")
    assert result.summary.totals.prompts == PROMPTS
    with pytest.raises(pipeline.RunError, match="but it is finished"):
        pipeline.replay(resume=tmp_path / "run")


@pytest.mark.slow
def test_errors_are_the_project_s_own(tiny_pair: TinyPair, tmp_path: Path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(pipeline.RunError, match="holds files"):
        quick(tiny_pair, tmp_path / "taken")
    with pytest.raises(pipeline.RunError, match=r"has no config\.json"):
        pipeline.replay(resume=tmp_path / "nowhere")
    with pytest.raises(pipeline.ConfigError, match="Unknown setting 'temperature'"):
        quick(tiny_pair, tmp_path / "run", temperature=1.0)
    with pytest.raises(pipeline.SourceError, match=r"nowhere\.jsonl"):
        quick(tiny_pair, tmp_path / "run", sources="nowhere.jsonl")
    with pytest.raises(pipeline.ModelError, match="there is no built-in model"):
        pipeline.replay(tiny_pair.sums, target="builtin:target-99m", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
