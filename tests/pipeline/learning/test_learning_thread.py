"""Learning on a thread of its own, with real models: what is decided depends on the stream alone."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from constants import constants
from replaying import config_of
from tiny_pair import TinyPair, sentences

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import load_models
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.update import Assignment, Attempt
from store.events import Event, PromptReceived, TokenDecision, Updated

PROMPTS = 9


def prompts() -> Iterator[PromptReceived]:
    for offset, text in enumerate(sentences(600, 600 + PROMPTS)):
        yield PromptReceived(offset, str(offset), "sums", offset + 1, text[:30])


def events_of(pair: TinyPair, folder: Path, lag: int, **changes: Any) -> list[Event]:
    """Decisions and updates of a run, without their times."""
    config = config_of(pair, **changes)
    with constants(update_lag=lag):
        loop = build_loop(config, load_models(config, "", folder), folder)
    return [without_times(event) for event in loop.run(prompts()) if isinstance(event, TokenDecision | Updated)]


def without_times(event: TokenDecision | Updated) -> Event:
    return replace(event, seconds=0.0, waited=0.0) if isinstance(event, Updated) else event


def drafter_updates(events: list[Event]) -> list[Updated]:
    return [event for event in events if isinstance(event, Updated) and event.part == "drafter"]


def slow_down(attempt: Callable[[DrafterTrainer, Assignment], Attempt]) -> Callable[..., Attempt]:
    def slow(trainer: DrafterTrainer, assignment: Assignment) -> Attempt:
        time.sleep(0.1)
        return attempt(trainer, assignment)

    return slow


@pytest.mark.parametrize("lag", [1, 2])
def test_however_slow_the_thread_is_the_same_is_decided(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
):
    quick = events_of(tiny_pair, tmp_path, lag=lag)
    monkeypatch.setattr(DrafterTrainer, "attempt", slow_down(DrafterTrainer.attempt))
    slow = events_of(tiny_pair, tmp_path, lag=lag)
    assert len(drafter_updates(quick)) >= 3
    assert quick == slow


def test_what_is_drafted_while_an_update_is_under_way_is_drafted_by_the_weights_before(
    tiny_pair: TinyPair, tmp_path: Path
):
    events = events_of(tiny_pair, tmp_path, lag=1)
    (first, *_) = [update for update in drafter_updates(events) if update.served]
    versions = {event.offset: event.drafter_version for event in events if isinstance(event, TokenDecision)}
    assert versions[first.offset + 1] == 0
    assert versions[first.offset + 2] == 1
    in_place = events_of(tiny_pair, tmp_path, lag=0)
    versions = {event.offset: event.drafter_version for event in in_place if isinstance(event, TokenDecision)}
    assert versions[first.offset + 1] == 1


def test_an_update_under_way_at_the_end_of_the_stream_is_reported_and_served(tiny_pair: TinyPair, tmp_path: Path):
    """Two prompts to an update: the last is handed in with the last but one and would be adopted after the last."""
    in_place, in_parallel = (drafter_updates(events_of(tiny_pair, tmp_path, lag=lag)) for lag in (0, 2))
    assert [update.offset for update in in_place] == [update.offset for update in in_parallel]
    assert in_parallel[-1].offset == PROMPTS - 2
    assert in_parallel[-1].drafter_version == sum(update.served for update in in_parallel)
