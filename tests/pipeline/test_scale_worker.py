"""A decode worker, without Ray: portions, reports, commits, weights, and the learner at the other end."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from replaying import config_of, replayed
from scaling import many_prompts, rows_of, texts_of
from tiny_pair import TinyPair, tiny_pair  # noqa: F401

from pipeline.coach import Finished
from pipeline.config import Config
from pipeline.learner_host import HostSetup
from pipeline.scale_learner import Learner
from pipeline.scale_worker import DecodeWorker, Report, WorkerSetup
from pipeline.source import open_sources, stream
from store.errors import OmnidraftError, RunError
from store.events import PromptReceived, Updated
from store.log import RunLog
from store.manifest import read_manifest
from store.partitions import close_partition, new_worker
from store.queries import LogReader

PROMPTS = 12


@pytest.fixture
def config(tiny_pair: TinyPair, tmp_path: Path) -> Config:  # noqa: F811
    prompts = many_prompts(tmp_path, PROMPTS)
    always = {"learn__spacing": "fixed", "commit__seconds": 0.001, "commit__share": 1.0}
    return config_of(tiny_pair, sources=(str(prompts),), batch=2, **always)


@pytest.fixture
def run(config: Config, tmp_path: Path) -> Path:
    """A run's folder with its own log and nothing in it."""
    with RunLog(tmp_path / "run"):
        return tmp_path / "run"


def prompts_of(config: Config) -> list[PromptReceived]:
    sources = open_sources(config.sources, config.source, seed=0, targets=config.targets)
    return [event for event in stream(sources) if isinstance(event, PromptReceived)]


def started(config: Config, folder: Path) -> DecodeWorker:
    worker = DecodeWorker(WorkerSetup(config, "", Path.cwd(), time.time()), folder)
    worker.start()
    return worker


def worked(worker: DecodeWorker, portions: Sequence[list[PromptReceived]]) -> tuple[list[Report], list[Finished]]:
    """Portions one after the other, then empty ones until all is completed."""
    reports, finished = [], list[Finished]()
    wanted = sum(map(len, portions))
    for portion in portions:
        report, more = worker.work(portion, None, more=True)
        reports.append(report)
        finished += more
    while sum(len(report.completed) + len(report.refused) for report in reports) < wanted:
        report, more = worker.work([], None, more=False)
        reports.append(report)
        finished += more
    return reports, finished


@pytest.mark.parametrize("size", [1, 3, 99])
def test_texts_do_not_depend_on_portions_and_the_log_has_what_is_reported(config, run, tmp_path: Path, size: int):
    frozen = config.with_overrides({"learn.enabled": False})
    replayed(frozen, tmp_path / "embedded")
    prompts = prompts_of(frozen)
    worker = started(frozen, new_worker(run))
    reports, finished = worked(worker, [prompts[begin : begin + size] for begin in range(0, len(prompts), size)])
    reports.append(worker.leave())
    assert texts_of(run) == texts_of(tmp_path / "embedded")
    completed = [one.offset for report in reports for one in report.completed]
    assert sorted(completed) == sorted(offset for report in reports for offset in report.committed)
    assert sorted(completed) == [offset for offset, _ in texts_of(run)]
    assert [one.prompt.offset for one in finished] == completed
    assert [offset for report in reports for offset, _ in report.refused] == [2]
    assert not any(one.prompt.prompt_text or one.prompt.completion_text for one in finished)


def test_rows_in_flight_go_on_from_portion_to_portion(config, run):
    """With two places one prompt never fills them: a portion ends at once, and the next one finds its row there."""
    prompts = [prompt for prompt in prompts_of(config) if prompt.offset != 2][:4]
    worker = started(config, new_worker(run))
    reports, _ = worked(worker, [[prompt] for prompt in prompts])
    assert [len(report.completed) for report in reports[:1]] == [0]
    assert max(row["rows"] for row in rows_of_committed(worker, run)) == 2


def rows_of_committed(worker: DecodeWorker, run: Path) -> list[dict]:
    worker.leave()
    return rows_of(run, "FROM blocks")


def test_a_log_that_is_committed_at_any_time_holds_whole_prompts(config, run):
    worker = started(config, new_worker(run))
    prompts = prompts_of(config)
    seen = 0
    for begin in range(0, len(prompts), 2):
        worker.work(prompts[begin : begin + 2], None, more=True)
        with LogReader([run]) as log:
            rows = log.select('SELECT "offset", count(*) AS blocks FROM blocks GROUP BY 1 ORDER BY 1').to_pylist()
            assert rows == log.select('SELECT "offset", blocks FROM prompts ORDER BY 1').to_pylist()
        seen = max(seen, len(rows))
    assert seen > 0


def test_a_worker_that_was_taken_to_be_dead_cannot_go_on(config, run):
    folder = new_worker(run)
    worker = started(config, folder)
    prompts = prompts_of(config)
    worked(worker, [prompts[:4]])
    kept = close_partition(folder)
    with pytest.raises(OmnidraftError, match="finished"):
        _leave_behind(worker, prompts[4:])
    assert read_manifest(folder) == kept
    with pytest.raises(RunError):
        started(config, folder)


def _leave_behind(worker: DecodeWorker, prompts: list[PromptReceived]) -> None:
    worked(worker, [prompts])
    worker.leave()


def test_what_is_learned_is_committed_and_served_in_the_next_block(config, run):
    worker = started(config, new_worker(run))
    found = worker.for_learner()
    learner = Learner(HostSetup(config, run, "", (), found.piece_cost, found.probe), Path.cwd())
    told, weights = learner.start()
    assert (told.news, weights) == (False, None)
    prompts = prompts_of(config)
    news, versions = None, {0}
    for begin in range(0, len(prompts), 2):
        _, finished = worker.work(prompts[begin : begin + 2], news, more=False)
        told, weights = learner.learn(finished)
        news = weights or news
        served = [row["drafter_version"] for row in rows_of(run, "FROM updates WHERE part = 'drafter' AND served")]
        changed = [event for event in told.events if isinstance(event, Updated) and event.part == "drafter"]
        if any(event.served for event in changed):
            assert told.news
            assert weights.drafter_version in served
        versions |= set(served)
    worker.leave()
    used = {row["v"] for row in rows_of(run, "SELECT DISTINCT drafter_version AS v FROM decisions")}
    assert len(used) > 1
    assert used <= versions
    assert learner.end({}, (), 1.0) == 0
