"""Completed prompts as a loop over a tiny pair posts them, the events of its local learner, and learner services."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from constants import constants
from replaying import config_of
from tiny_pair import TinyPair, sentences

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import load_models
from pipeline.assembly.training import piece_cost
from pipeline.config.settings import Config
from pipeline.learner_protocol import CompletedPrompt, Learner
from pipeline.learner_service.service import LearnerConfig, LearnerService
from store.events import Event, PromptCompleted, PromptReceived
from store.log.run_log import Commit, RunLog

NOBODY = "http://127.0.0.1:9"  # no MLflow server is there
# Fields that differ from run to run, or with the memory, which only a local learner publishes.
VARYING = ("seconds", "waited", "digest", "created", "memory_tokens", "changes")


def prompts(count: int) -> Iterator[PromptReceived]:
    """Yield prompts with sums, then prompts of quite another form."""
    for offset, text in enumerate(sentences(600, 600 + count)):
        text = text[:30] if offset < count // 2 else text[:30].swapcase()[::-1]
        yield PromptReceived(offset, str(offset), "sums", offset + 1, text)


class RecordingLearner:
    """Wraps a learner and records the completed prompts and its events."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.finished: list[CompletedPrompt] = []
        self.events: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def _record(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            self.events.append(drop_varying(event))
            yield event

    def publish_baseline(self) -> Iterator[Event]:
        return self._record(self._learner.publish_baseline())

    def on_prompt_completed(self, finished: CompletedPrompt) -> Iterator[Event]:
        self.finished.append(finished)
        return self._record(self._learner.on_prompt_completed(finished))

    def end(self) -> Iterator[Event]:
        return self._record(self._learner.end())


def drop_varying(event: Event) -> Event:
    """Reset the fields that differ from run to run, and those of the probe, which a service of these tests lacks."""
    reset = dict.fromkeys(field.name for field in fields(event) if field.name.startswith("probe_"))
    return replace(event, **reset, **{name: type(getattr(event, name))() for name in VARYING if hasattr(event, name)})


def make_config(pair: TinyPair, **changes: Any) -> Config:
    """Make the settings of a run whose drafter learns at once."""
    usual = {"learn__method": "gradient", "learn__spacing": "fixed", "sampling__temperature": 1.0}
    return config_of(pair, **usual | changes)


def run_local_learner(config: Config, folder: Path, count: int) -> RecordingLearner:
    """Run a stream with a learner in the loop's process."""
    with constants(update_lag=0):  # as a service learns
        loop = build_loop(config, load_models(config, "", folder), folder)
    (runner,) = loop.runners.values()
    runner.learner = learner = RecordingLearner(runner.learner)
    for _ in loop.run(prompts(count)):
        pass
    return learner


def make_learner_config(config: Config, run: Path) -> LearnerConfig:
    """Make the configuration of a learner service without a probe."""
    cost = piece_cost(config.draft.costs, load_models(config, "", run))
    return LearnerConfig(config, run, NOBODY, (("sums", "tests"),), cost, ())


def write_log(run: Path, completed: Sequence[PromptCompleted]) -> None:
    """Write these prompts to the run's own log, as a server commits them."""
    log = RunLog(run)
    for prompt in completed:
        log.append(prompt)
    log.commit(Commit(dict), wait=True)
    log.close()


def make_service(setup: LearnerConfig) -> LearnerService:
    return LearnerService(setup)


def learn_from(service: LearnerService, finished: Sequence[CompletedPrompt]) -> list[Event]:
    """Let a service learn from completed prompts. Returns its events."""
    for one in finished:
        service.on_prompt_completed(one)
    return [drop_varying(event) for event in service.drain_events()]
