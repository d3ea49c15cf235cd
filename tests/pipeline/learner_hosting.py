"""Completed prompts as a loop over a tiny pair posts them, what its own coach made of them, and hosts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replaying import config_of
from tiny_pair import TinyPair, sentences

from pipeline.build import build_loop
from pipeline.build_learning import piece_cost
from pipeline.build_models import load_models
from pipeline.coach import Coach, Finished
from pipeline.config import Config
from pipeline.learner_host import HostSetup, LearnerHost
from store.events import Event, PromptCompleted, PromptReceived
from store.log import Commit, RunLog
from store.registry import NoRegistry

NOBODY = "http://127.0.0.1:9"  # no MLflow server is there
UNTOLD = ("seconds", "waited", "digest", "created")  # what no two runs have in common


def prompts(count: int) -> Iterator[PromptReceived]:
    """Sums, then what looks quite different."""
    for offset, text in enumerate(sentences(600, 600 + count)):
        text = text[:30] if offset < count // 2 else text[:30].swapcase()[::-1]
        yield PromptReceived(offset, str(offset), "sums", offset + 1, text)


class NotedCoach:
    """Another coach, of which it is noted what it was told and what it said."""

    def __init__(self, coach: Coach) -> None:
        self._coach = coach
        self.finished: list[Finished] = []
        self.said: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coach, name)

    def _noted(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            self.said.append(untold(event))
            yield event

    def floor(self) -> Iterator[Event]:
        return self._noted(self._coach.floor())

    def completed(self, finished: Finished) -> Iterator[Event]:
        self.finished.append(finished)
        return self._noted(self._coach.completed(finished))

    def end(self) -> Iterator[Event]:
        return self._noted(self._coach.end())


def untold(event: Event) -> Event:
    """Without the times, and what follows from them."""
    return replace(event, **{name: type(getattr(event, name))() for name in UNTOLD if hasattr(event, name)})


def host_config(pair: TinyPair, **changes: Any) -> Config:
    """Settings of a run whose drafter learns at once."""
    return config_of(pair, **{"learn__spacing": "fixed", "learn__lag": 0, "sampling__temperature": 1.0, **changes})


def embedded(config: Config, folder: Path, count: int) -> NotedCoach:
    """The stream with its coach beside the loop."""
    loop = build_loop(config, load_models(config, "", folder), NoRegistry(), folder, lambda told: None)
    (lane,) = loop.lanes.values()
    lane.coach = coach = NotedCoach(lane.coach)
    for _ in loop.run(prompts(count)):
        pass
    return coach


def setup_of(config: Config, run: Path) -> HostSetup:
    """A host's, without a probe."""
    cost = piece_cost(config, load_models(config, "", run))
    return HostSetup(config, run, NOBODY, (("sums", "tests"),), cost, ())


def logged(run: Path, completed: Sequence[PromptCompleted]) -> None:
    """The run's own log with these prompts, as the server would have committed it."""
    log = RunLog(run)
    for prompt in completed:
        log.append(prompt)
    log.commit(Commit(dict), wait=True)
    log.close()


def host_of(setup: HostSetup) -> LearnerHost:
    """One that tells nobody."""
    return LearnerHost(setup, lambda told: None)


def fed(host: LearnerHost, finished: Sequence[Finished]) -> list[Event]:
    """What it says of them."""
    for one in finished:
        host.completed(one)
    return [untold(event) for event in host.told()]
