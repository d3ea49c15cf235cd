"""Builds the arms of the benchmark, and the records that the arm with a log writes as `replay` does."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from typing_extensions import override

from benchmarks.speed.arms import Arm, ArmName, Engines
from benchmarks.speed.text_arms import ContinuousArm, GenerateArm, Method, PromptWords, request_of
from benchmarks.speed.transformers_baselines import (
    AssistedDrafter,
    ContinuousBatching,
    assisted_generate,
    greedy_generate,
    prompt_lookup,
)
from benchmarks.speed.work import MeasuredRound, work_of
from pipeline.assembly.models import Models, load_only_target, locate, registry_uri
from pipeline.config.settings import Config
from pipeline.learning.drift import DriftMonitor
from pipeline.learning.local_learner import LocalLearner
from pipeline.learning.publisher import Publisher
from pipeline.loop import Loop
from pipeline.run.committer import Committer
from pipeline.run.context import EventSink
from pipeline.run.rounds import LoopInRounds, Records
from stages.contract.snapshot import State
from stages.engine.models.huggingface import load_causal_model, load_tokenizer
from store.events import Drifted, Event, PromptCompleted, PromptReceived, VersionPublished
from store.log.run_log import RunLog

T = TypeVar("T")

FROZEN: Mapping[str, object] = {"learn.enabled": False}
NEVER_LEARNED: Mapping[str, object] = {"learn.enabled": False, "draft.sources": ("own", "model")}


class Stopwatch:
    """Sums the seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[[], T]) -> T:
        """Time a call and return its result."""
        started = perf_counter()
        result = call()
        self.seconds += perf_counter() - started
        return result


class TimedPublisher(Publisher):
    """Wraps a publisher and times its calls."""

    def __init__(self, publisher: Publisher, stopwatch: Stopwatch) -> None:
        self._publisher, self._stopwatch = publisher, stopwatch

    @override
    def publish_baseline(self) -> Iterator[VersionPublished]:
        yield from self._stopwatch.time(lambda: list(self._publisher.publish_baseline()))

    @override
    def publish_on_drift(self, drifted: Drifted) -> Iterator[VersionPublished]:
        yield from self._stopwatch.time(lambda: list(self._publisher.publish_on_drift(drifted)))

    @override
    def publish_if_due(self, prompt: PromptCompleted) -> Iterator[VersionPublished]:
        yield from self._stopwatch.time(lambda: list(self._publisher.publish_if_due(prompt)))

    @override
    def end(self, offset: int | None = None) -> Iterator[VersionPublished]:
        yield from self._stopwatch.time(lambda: list(self._publisher.end(offset)))

    @override
    def state_dict(self) -> State:
        return self._publisher.state_dict()

    @override
    def load_state_dict(self, state: State) -> None:
        self._publisher.load_state_dict(state)


class ReplayRecords(Records):
    """Writes the log as `replay` does, and versions as folders, and times all of it.

    MLflow is left out, because its process would run in parallel with other arms. The log's writer thread is
    measured in processor time. Drift detection is timed on a second detector that sees the same prompts.
    """

    def __init__(self, folder: Path, config: Config, clock: Callable[[], float], loop: Loop) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        others = set(threading.enumerate())
        self._log = RunLog(folder)
        self._events = EventSink(self._log)
        self._writers = set(threading.enumerate()) - others
        self._stopwatches = {"log": Stopwatch(), "versions": Stopwatch(), "drift": Stopwatch()}
        self._committer = Committer(
            config.commit.seconds, loop.state_dict, lambda: loop.updating, self._log, clock=clock
        )
        self._drift = DriftMonitor(config.drift_in_effect)
        for runner in loop.runners.values():
            if isinstance(runner.learner, LocalLearner):
                runner.learner.publisher = TimedPublisher(runner.learner.publisher, self._stopwatches["versions"])

    @override
    def take(self, event: Event) -> None:
        """Record an event, as `Replay` does."""
        self._stopwatches["log"].time(lambda: self._events.take([event]))
        if isinstance(event, PromptCompleted):
            self._stopwatches["drift"].time(lambda: self._drift.observe(event))

    @override
    def pause(self) -> bool:
        """Commit when `Replay` would; never stops the loop."""
        if self._committer.is_due():
            self._stopwatches["log"].time(self._committer.commit)
        return False

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds spent so far, by field of `Work`."""
        writing = sum(processor_seconds(thread) for thread in self._writers)
        return {name: stopwatch.seconds for name, stopwatch in self._stopwatches.items()} | {"log_beside": writing}

    @override
    def close(self) -> None:
        """Write the remaining events and close the log."""
        self._log.close()


def processor_seconds(thread: threading.Thread) -> float:
    """Processor seconds that a running thread has used; 0 if the system does not report them."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


class RoundClock:
    """A clock that runs during rounds only. Times are seconds of all rounds so far."""

    def __init__(self) -> None:
        self._passed, self._began = 0.0, 0.0
        self._goes = False

    def __call__(self) -> float:
        """Return the current time."""
        return self._passed + (perf_counter() - self._began if self._goes else 0.0)

    def go(self) -> None:
        """Start the clock for a round."""
        self._goes, self._began = True, perf_counter()

    def stop(self) -> None:
        """Stop the clock after a round."""
        self._passed, self._goes = self(), False


class PipelineArm(LoopInRounds, Arm):
    """The pipeline's loop: without drafting, frozen, learning, or, with `logged`, learning with a log."""

    def __init__(self, models: Models, config: Config, folder: Path, *, logged: bool = False) -> None:
        self._clock = RoundClock()
        super().__init__(models, config, folder, partial(self._keep, folder, config, logged))

    def _keep(self, folder: Path, config: Config, logged: bool, loop: Loop) -> Records:
        self._timed = ReplayRecords(folder, config, self._clock, loop) if logged else None
        return self._timed or Records()

    @override
    def complete(self, prompts: Sequence[PromptReceived]) -> MeasuredRound:
        before = self._timed.seconds() if self._timed else {}
        self._clock.go()
        done = super().complete(prompts)
        self._clock.stop()
        spent = self._timed.seconds() if self._timed else {}
        records = {name: seconds - before[name] for name, seconds in spent.items()}
        return MeasuredRound(done.tokens, done.seconds, work=work_of(done.events, records, done.waited))


class Workshop:
    """Builds arms. Those of `transformers` share a copy of the target, ours share another, `continuous` has its own.

    Args:
        config: models, sampling and settings of the pipeline's arms.
        scratch: an empty folder for downloaded models, logs and versions.

    Attributes:
        words: encoder of prompts for all arms.
    """

    def __init__(self, config: Config, scratch: Path) -> None:
        self._config, self._scratch = config.with_overrides({"publish.enabled": False}), scratch
        # models for vocabularies and for measuring bare forward passes, used by no arm
        self.models = self._load("measure")
        self.words, self._request = PromptWords(config, self.models), request_of(self.models, config)
        self._device = str(self.models.target.device)
        self._target_source = locate(self.models.name, registry_uri(config.publish), scratch / "target")
        self._drafter_source = str(self.models.drafter_folder or config.drafter)
        self.target = self._copy(self._target_source)  # model of `transformers`

    def _load(self, name: str) -> Models:
        return load_only_target(self._config, self._scratch / name)

    def _copy(self, source: str) -> Any:
        return load_causal_model(source, self._config.dtype, self._device)

    def make(self, name: str, longest: int, engines: Engines) -> Arm:
        """Build the arm with a name.

        `longest`: tokens of the longest prompt and completion together; `engines` builds those not in `ArmName`.

        Raises:
            UsageError: an engine cannot run these models.
        """
        own: Mapping[str, Callable[[], Arm]] = {
            ArmName.PLAIN: lambda: self._make_generate(greedy_generate),
            ArmName.ASSISTED: lambda: self._make_assisted(self._config.draft.max_draft),
            ArmName.ASSISTED_DEFAULTS: lambda: self._make_assisted(None),
            ArmName.PROMPT_LOOKUP: lambda: self._make_generate(prompt_lookup),
            ArmName.CONTINUOUS: lambda: self._make_continuous(longest),
            ArmName.OWN_PLAIN: lambda: self._make_pipeline(name, {"learn.enabled": False, "draft.max_draft": 0}),
            ArmName.MEMORY: lambda: self._make_pipeline(name, {**FROZEN, "draft.sources": ("own", "memory")}),
            ArmName.NEVER_LEARNED: lambda: self._make_pipeline(name, NEVER_LEARNED),
            ArmName.FROZEN: lambda: self._make_pipeline(name, FROZEN),
            ArmName.LEARNING: lambda: self._make_pipeline(name, {}),
            ArmName.LOGGED: lambda: self._make_logged(name, {}),
            ArmName.MEMORY_LOGGED: lambda: self._make_logged(name, {"draft.sources": ("own", "memory")}),
            ArmName.NEVER_LEARNED_LOGGED: lambda: self._make_logged(name, NEVER_LEARNED),
            ArmName.FROZEN_LOGGED: lambda: self._make_logged(name, FROZEN),
        }
        if name in own:
            return own[name]()
        return engines.build(name, self._config, self.models, self._scratch / "engines", longest)

    def _make_generate(self, method: Method) -> Arm:
        return GenerateArm(self.words, self.target, self._request, self._config.batch, method)

    def _make_assisted(self, length: int | None) -> Arm:
        tokenizers = load_tokenizer(self._drafter_source), load_tokenizer(self._target_source)
        drafter = AssistedDrafter.from_drafter(self._copy(self._drafter_source), *tokenizers, length)
        return self._make_generate(partial(assisted_generate, drafter=drafter))

    def _make_continuous(self, longest: int) -> Arm:
        target = self._copy(self._target_source)
        return ContinuousArm(self.words, ContinuousBatching(target, self._request, self._config.batch, longest))

    def _make_pipeline(self, name: str, settings: Mapping[str, object]) -> Arm:
        config = self._config.with_overrides(settings)
        return PipelineArm(self._own_models(name, learns=config.learn.enabled), config, self._scratch / f"{name}-run")

    def _make_logged(self, name: str, settings: Mapping[str, object]) -> Arm:
        config = self._config.with_overrides({"publish.enabled": True, **settings})
        models, folder = self._own_models(name, learns=config.learn.enabled), self._scratch / f"{name}-run"
        return PipelineArm(models, config, folder, logged=True)

    def _own_models(self, name: str, *, learns: bool) -> Models:
        """The shared weights with separate caches; a drafter that learns has its own weights too."""
        drafter = self._load(name).drafter if learns else self.models.drafter.share_weights()
        return replace(self.models, target=self.models.target.share_weights(), drafter=drafter)
