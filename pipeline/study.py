"""Running a study: every arm on the same prompts and seeds, the arms in turn, kept run by run."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.config import Config, settings
from pipeline.study_arms import Arm, Study, StudyName
from pipeline.study_records import Key, Record, StudyFile
from store.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from pipeline.study_run import Task  # torch: only when something really runs

UNSHARED = ("targets", "seed", "run", "publish.mlflow_uri", "publish.name")  # these make no other study
FULL = "full"  # the arm whose cache decides the budgets of the others


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        study: the comparison.
        arms: those of its arms that are run, in its order.
        config: all that the arms share; its seed is the first.
        targets: each a study of its own.
        seeds: how many.
        segment: prompts of a segment when two sources alternate; None for one source after another.
    """

    study: Study
    arms: tuple[Arm, ...]
    config: Config
    targets: tuple[str, ...]
    seeds: int
    segment: int | None = None

    def __post_init__(self) -> None:
        if "-" in self.config.sources:
            raise SourceError("A study reads its sources once per run, so standard input cannot be one; name a file.")
        if self.study.name is StudyName.DRIFT and len(self.config.sources) != 2:
            raise ConfigError(f"The study 'drift' needs two sources, got {len(self.config.sources)}.")
        if self.config.swaps:
            raise ConfigError("A study takes one target at a time, so swaps must be left out; repeat --target instead.")
        if self.segment is not None and self.study.name is not StudyName.DRIFT:
            raise ConfigError(f"Segments belong to the study 'drift', not to '{self.study.name}'.")
        if any(arm.share is not None for arm in self.arms) and FULL not in {arm.name for arm in self.arms}:
            raise ConfigError(f"Arms whose budget is a share need the arm '{FULL}'; name it as well.")

    def order(self) -> list[Key]:
        """All runs in their order: the arms take turns, each seed begins with another one."""
        return [
            Key(target, self.config.seed + number, arm.name)
            for target in self.targets
            for number in range(self.seeds)
            for arm in _rotated(self.arms, number)
        ]

    def shared(self) -> dict[str, Any]:
        """The settings that all runs in one file must share. Targets and seeds may be added to a file later."""
        values = _flat(self._base().model_dump(mode="json"))
        plan = {"study": str(self.study.name), "segment": self.segment}
        return plan | {key: value for key, value in values.items() if key not in UNSHARED}

    def config_of(self, key: Key, full: Record | None) -> Config:
        """Every setting of one run. `full` is the run whose cache decides this one's budget, if there is such."""
        arm = self.study.arm(key.arm)
        own: dict[str, Any] = {"targets": (key.target,), "seed": key.seed, **arm.settings}
        if arm.share is not None and full is not None:
            own["cache.budget_bytes"] = max(1, int(arm.share * full.cache_bytes))
        return self._base().with_overrides(own)

    def _base(self) -> Config:
        return self.config.with_overrides({"publish.enabled": False, **self.study.settings})


def _rotated(arms: Sequence[Arm], number: int) -> tuple[Arm, ...]:
    first = number % len(arms)
    return (*arms[first:], *arms[:first])


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """By dotted keys, as settings are named."""
    return {key: _inside(values, key) for key in settings()}


def _inside(values: dict[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return values[section][name] if section else values[name]


def full_of(key: Key) -> Key:
    """The run whose cache decides this one's budget."""
    return Key(key.target, key.seed, FULL)


class Watcher(Protocol):
    """Hears how a study goes."""

    def passed(self) -> None:
        """One more prompt of the run in this process is completed; not called for runs in other processes."""
        ...

    def done(self, record: Record) -> None:
        """A run is finished and in the file."""
        ...


def run(plan: Plan, file: StudyFile, jobs: int, watcher: Watcher) -> None:
    """Run what is missing in the file.

    Args:
        jobs: runs at the same time, each in a process of its own; 1 runs all of them in this one.
        watcher: hears of progress.

    Raises:
        UsageError: what a run raises.
    """
    waiting = [key for key in plan.order() if key not in file.records]
    finished = _side_by_side(plan, file, waiting, jobs) if jobs > 1 else _in_turn(plan, file, waiting, watcher)
    for record in finished:
        file.add(record)
        watcher.done(record)


def _take(plan: Plan, file: StudyFile, waiting: list[Key]) -> "Task | None":
    """Remove from `waiting` the first run that can begin, as a task; None while all that is left depends on others."""
    from pipeline.study_run import Task

    for key in waiting:
        needed = plan.study.arm(key.arm).share is not None
        if not needed or full_of(key) in file.records:
            waiting.remove(key)
            return Task(key, plan.config_of(key, file.records.get(full_of(key))), plan.segment)
    return None


def _in_turn(plan: Plan, file: StudyFile, waiting: list[Key], watcher: Watcher) -> Iterator[Record]:
    from pipeline.study_run import run_task

    while (task := _take(plan, file, waiting)) is not None:
        yield run_task(task, watcher.passed)


def _side_by_side(plan: Plan, file: StudyFile, waiting: list[Key], jobs: int) -> Iterator[Record]:
    from pipeline.study_run import run_task

    running: set[Future[Record]] = set()
    # A forked process could not use an accelerator, nor tensors' threads.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        while waiting or running:
            while len(running) < jobs and (task := _take(plan, file, waiting)) is not None:
                running.add(pool.submit(run_task, task))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    finally:
        pool.shutdown(cancel_futures=True)
