"""Runs a study: every arm on the same prompts and seeds, the arms in turn, saving each run."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from benchmarks.studies.definitions import Study, StudyArm, StudyName
from benchmarks.studies.records import Key, Record, StudyFile
from pipeline.config.settings import Config, settings
from store.errors import ConfigError, SourceError

if TYPE_CHECKING:
    from benchmarks.studies.task import StudyTask  # imports torch, which only a run needs

UNSHARED = (
    "targets",
    "seed",
    "run",
    "publish.mlflow_uri",
    "publish.name",
)  # settings that may differ between runs in one file
FULL = "full"  # arm whose cache size determines the budgets of the others


@dataclass(frozen=True)
class StudyPlan:
    """Plan of a study.

    Raises:
        SourceError: a source is standard input.
        ConfigError: the settings or the arms do not fit the study.
    """

    study: Study  # the study
    arms: tuple[StudyArm, ...]  # arms to run, in the order of the study
    config: Config  # settings that all arms share; its seed is the first
    targets: tuple[str, ...]  # names of the targets; each has its own tables
    seeds: int  # number of seeds
    segment: int | None = None  # prompts per segment if two sources alternate; None for one source after another

    def __post_init__(self) -> None:
        if "-" in self.config.sources:
            raise SourceError("A study reads its sources once per run, so standard input cannot be one; name a file.")
        if self.study.name is StudyName.DRIFT and len(self.config.sources) != 2:
            raise ConfigError(f"The study 'drift' needs two sources, got {len(self.config.sources)}.")
        if self.config.swaps and len(self.targets) > 1:
            raise ConfigError("A study whose target changes during the stream begins with one target; name one.")
        if self.segment is not None and self.study.name is not StudyName.DRIFT:
            raise ConfigError(f"Segments belong to the study 'drift', not to '{self.study.name}'.")
        if any(arm.share is not None for arm in self.arms) and FULL not in {arm.name for arm in self.arms}:
            raise ConfigError(f"Arms whose budget is a share need the arm '{FULL}'; name it as well.")

    def order(self) -> list[Key]:
        """All runs in order: the arms take turns, and each seed starts with another arm."""
        return [
            Key(target, self.config.seed + number, arm.name)
            for target in self.targets
            for number in range(self.seeds)
            for arm in islice(cycle(self.arms), number, number + len(self.arms))
        ]

    def shared_settings(self) -> dict[str, Any]:
        """Settings that all runs in one file must share. Targets and seeds may be added to a file later."""
        values = _flatten(self.base_config().model_dump(mode="json"))
        plan = {"study": str(self.study.name), "segment": self.segment}
        return plan | {key: value for key, value in values.items() if key not in UNSHARED}

    def config_of(self, key: Key, full: Record | None) -> Config:
        """All settings of one run. `full` is the run whose cache size determines the budget of this one, if any."""
        arm = self.study.arm(key.arm)
        own: dict[str, Any] = {"targets": (key.target,), "seed": key.seed, **arm.settings}
        if arm.share is not None and full is not None:
            own["cache.budget_bytes"] = max(1, int(arm.share * full.cache_bytes))
        return self.base_config().with_overrides(own)

    def base_config(self) -> Config:
        """Return the settings that all runs have in common, those of the study included."""
        return self.config.with_overrides({"publish.enabled": False, **self.study.settings})


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested settings to dotted keys."""
    return {key: _setting_value(values, key) for key in settings()}


def _setting_value(values: dict[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    return values[section][name] if section else values[name]


def full_of(key: Key) -> Key:
    """Key of the run whose cache size determines the budget of this one."""
    return Key(key.target, key.seed, FULL)


def run(plan: StudyPlan, file: StudyFile, jobs: int, on_run: Callable[[Record], None]) -> None:
    """Run the runs of the plan that are missing in the file.

    Args:
        jobs: number of parallel runs, each in its own process; 1 runs all of them in this process.
        on_run: called with each finished run after it is in the file.

    Raises:
        UsageError: a run cannot work; see `run_task`.
    """
    waiting = [key for key in plan.order() if key not in file.records]
    finished = _side_by_side(plan, file, waiting, jobs) if jobs > 1 else _in_turn(plan, file, waiting)
    for record in finished:
        file.add(record)
        on_run(record)


def _take(plan: StudyPlan, file: StudyFile, waiting: list[Key]) -> "StudyTask | None":
    """Remove the first run that can start from `waiting` and return its task; None if all wait for other runs."""
    from benchmarks.studies.task import StudyTask

    for key in waiting:
        needed = plan.study.arm(key.arm).share is not None
        if not needed or full_of(key) in file.records:
            waiting.remove(key)
            config = plan.config_of(key, file.records.get(full_of(key)))
            return StudyTask(key, config, plan.segment, plan.study.name is StudyName.LEARNING)
    return None


def _in_turn(plan: StudyPlan, file: StudyFile, waiting: list[Key]) -> Iterator[Record]:
    from benchmarks.studies.task import run_task

    while (task := _take(plan, file, waiting)) is not None:
        yield run_task(task)


def _side_by_side(plan: StudyPlan, file: StudyFile, waiting: list[Key], jobs: int) -> Iterator[Record]:
    from benchmarks.studies.task import run_task

    running: set[Future[Record]] = set()
    # A forked process could use neither an accelerator nor the threads of tensors.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        while waiting or running:
            while len(running) < jobs and (task := _take(plan, file, waiting)) is not None:
                running.add(pool.submit(run_task, task))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    finally:
        pool.shutdown(cancel_futures=True)
