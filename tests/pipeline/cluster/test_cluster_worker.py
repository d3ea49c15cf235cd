"""A decode worker, without Ray: work items, reports, commits, weights, and the learner that they go to."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from replaying import config_of, run_replay
from scaling import many_prompts, read_texts, select_rows
from tiny_pair import TinyPair

from pipeline.cluster.learner import LearnerActor
from pipeline.cluster.worker import DecodeWorker, WorkerReport, WorkerSetup
from pipeline.config.settings import Config
from pipeline.learner_protocol import CompletedPrompt
from pipeline.learner_service.service import LearnerConfig
from pipeline.sources.stream import open_sources, stream
from store.errors import OmnidraftError, RunError
from store.events import PromptReceived, Updated
from store.log.manifest import read_manifest
from store.log.partitions import close_partition, create_worker_partition
from store.log.run_log import RunLog

PROMPTS = 12


@pytest.fixture
def config(tiny_pair: TinyPair, tmp_path: Path) -> Config:
    prompts = many_prompts(tmp_path, PROMPTS)
    always = {"learn__spacing": "fixed", "commit__seconds": 0.001}
    return config_of(tiny_pair, sources=(str(prompts),), batch=2, **always)


@pytest.fixture
def run(config: Config, tmp_path: Path) -> Path:
    """The folder of a run whose log is empty."""
    with RunLog(tmp_path / "run"):
        return tmp_path / "run"


def read_prompts(config: Config) -> list[PromptReceived]:
    sources = open_sources(config.sources, config.source, seed=0, targets=config.targets)
    return [event for event in stream(sources) if isinstance(event, PromptReceived)]


def start_worker(config: Config, folder: Path) -> DecodeWorker:
    worker = DecodeWorker(WorkerSetup(config, "", Path.cwd(), time.time()), folder)
    worker.start()
    return worker


def work_until_done(
    worker: DecodeWorker, work_items: Sequence[list[PromptReceived]]
) -> tuple[list[WorkerReport], list[CompletedPrompt]]:
    """Give a worker work items one after the other, then empty ones until all prompts are completed."""
    reports, finished = [], list[CompletedPrompt]()
    wanted = sum(map(len, work_items))
    for work_item in work_items:
        report, more = worker.work(work_item, None, more=True)
        reports.append(report)
        finished += more
    while sum(len(report.completed) + len(report.refused) for report in reports) < wanted:
        report, more = worker.work([], None, more=False)
        reports.append(report)
        finished += more
    return reports, finished


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_texts_do_not_depend_on_work_items_and_the_log_holds_all_reported_prompts(
    config, run, tmp_path: Path, size: int
):
    frozen = config.with_overrides({"learn.enabled": False})
    run_replay(frozen, tmp_path / "embedded")
    prompts = read_prompts(frozen)
    worker = start_worker(frozen, create_worker_partition(run))
    reports, finished = work_until_done(
        worker, [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]
    )
    reports.append(worker.finish())
    assert read_texts(run) == read_texts(tmp_path / "embedded")
    completed = [one.offset for report in reports for one in report.completed]
    assert sorted(completed) == sorted(offset for report in reports for offset in report.committed)
    assert sorted(completed) == [offset for offset, _ in read_texts(run)]
    assert [one.prompt.offset for one in finished] == completed
    assert [offset for report in reports for offset, _ in report.refused] == [2]
    assert not any(one.prompt.prompt_text or one.prompt.completion_text for one in finished)


def test_a_worker_whose_partition_was_closed_cannot_continue(config, run):
    folder = create_worker_partition(run)
    worker = start_worker(config, folder)
    prompts = read_prompts(config)
    work_until_done(worker, [prompts[:4]])
    manifest = close_partition(folder)
    with pytest.raises(OmnidraftError, match="finished"):
        _work_and_finish(worker, prompts[4:])
    assert read_manifest(folder) == manifest
    with pytest.raises(RunError):
        start_worker(config, folder)


def _work_and_finish(worker: DecodeWorker, prompts: list[PromptReceived]) -> None:
    work_until_done(worker, [prompts])
    worker.finish()


@pytest.mark.slow
def test_learned_weights_are_committed_and_used_in_the_next_block(config, run):
    worker = start_worker(config, create_worker_partition(run))
    info = worker.describe_target()
    learner = LearnerActor(LearnerConfig(config, run, "", (), info.piece_cost, info.probe), Path.cwd())
    report, weights = learner.start()
    assert (report.has_weights, weights) == (False, None)
    prompts = read_prompts(config)
    pending, versions = None, {0}
    for begin in range(0, len(prompts), 2):
        _, finished = worker.work(prompts[begin : begin + 2], pending, more=False)
        report, weights = learner.learn(finished)
        pending = weights or pending
        served = [row["drafter_version"] for row in select_rows(run, "FROM updates WHERE part = 'drafter' AND served")]
        changed = [event for event in report.events if isinstance(event, Updated) and event.part == "drafter"]
        if any(event.served for event in changed):
            assert report.has_weights
            assert weights.drafter_version in served
        versions |= set(served)
    worker.finish()
    used = {row["v"] for row in select_rows(run, "SELECT DISTINCT drafter_version AS v FROM decisions")}
    assert len(used) > 1
    assert used <= versions
    assert learner.end(1.0)


def test_what_one_worker_completed_is_drafted_by_another(config, run):
    """Both decode the same prompts: the second copies the texts of the first from its memory."""
    frozen = config.with_overrides({"learn.enabled": False, "draft.sources": ("memory",), "draft.costs": "estimated"})
    prompts = read_prompts(frozen)[:2]
    first, second, alone = (start_worker(frozen, create_worker_partition(run)) for _ in range(3))
    reports, _ = work_until_done(first, [prompts])
    shares = [report.memory for report in reports]
    assert sum(len(share.texts) for share in shares) == len(prompts)
    for share in shares:
        second.work([], None, share, more=False)
    accepted = []
    for worker in (second, alone):
        reports, _ = work_until_done(worker, [prompts])
        accepted.append(sum(prompt.lookup_accepted for report in reports for prompt in report.completed))
    assert accepted[0] > accepted[1]
