"""The contract of `Coach`, over both implementations: what a lane may rely on, wherever its drafter is taught."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from event_making import completed
from test_answer_contract import lesson_of
from test_stage_contract import llama, new_distill

from pipeline import coach as coach_module
from pipeline import coach_remote as remote_module
from pipeline.answer import NoAnswer
from pipeline.coach import Coach, Finished, LocalCoach, WatchingCoach
from pipeline.coach_remote import RemoteCoach
from pipeline.config_sections import DriftSettings
from pipeline.drift import DriftWatch, Rates
from pipeline.publish import NoPublisher
from stages.head import AcceptanceHead
from stages.language_model import LanguageModel
from stages.snapshot import SnapshotReader, SnapshotWriter
from stages.weights import Weights, taken_out
from store.events import Event, Updated


@dataclass
class StubLink:
    """Keeps what is posted; has news when it is given some."""

    posted: list[Finished] = field(default_factory=list)
    waiting: list[Weights] = field(default_factory=list)

    def post(self, finished: Finished) -> None:
        self.posted.append(finished)

    def news(self) -> Weights | None:
        return self.waiting.pop() if self.waiting else None


def local() -> Coach:
    return LocalCoach(new_distill(), DriftWatch(DriftSettings(), Rates(False)), NoAnswer(), NoPublisher())


def remote() -> Coach:
    model = llama(4)
    return RemoteCoach(StubLink(), model, AcceptanceHead(model.hidden_size, 0))


def watching() -> Coach:
    return WatchingCoach(DriftWatch(DriftSettings(), Rates(False)))


COACHES: dict[str, Callable[[], Coach]] = {"LocalCoach": local, "RemoteCoach": remote, "WatchingCoach": watching}
every_coach = pytest.mark.parametrize("make", COACHES.values(), ids=list(COACHES))


def finished(offset: int, *, private: bool = False) -> Finished:
    return Finished(completed(offset), None if private else lesson_of(offset), () if private else (1, 2))


def saved(coach: Coach) -> dict[str, bytes]:
    keep = SnapshotWriter()
    return keep.files(coach.save(keep))


def taught(coach: Coach, prompts: int) -> list[Event]:
    events: list[Event] = [*coach.floor()]
    for offset in range(prompts):
        events += [*coach.news(), *coach.completed(finished(offset))]
    return [*events, *coach.end()]


@every_coach
def test_versions_are_those_of_the_updates_that_were_told(make: Callable[[], Coach]):
    coach = make()
    assert (coach.drafter_version, coach.head_version) == (0, 0)
    updates = [event for event in taught(coach, 6) if isinstance(event, Updated) and event.served]
    told = [update.drafter_version for update in updates if update.part == "drafter"]
    assert coach.drafter_version == (told[-1] if told else 0)


@every_coach
def test_nothing_is_learned_of_what_must_not_be(make: Callable[[], Coach]):
    coach = make()
    events = [event for offset in range(6) for event in coach.completed(finished(offset, private=True))]
    assert not any(isinstance(event, Updated) for event in (*events, *coach.end()))
    assert (coach.drafter_version, coach.head_version) == (0, 0)


@every_coach
def test_it_can_be_ended_and_waited_for_again(make: Callable[[], Coach]):
    coach = make()
    taught(coach, 3)
    assert list(coach.end()) == []
    assert coach.wait() is False
    assert coach.busy is False


@every_coach
def test_it_goes_on_from_what_was_saved(make: Callable[[], Coach]):
    coach, other = make(), make()
    taught(coach, 3)
    keep = SnapshotWriter()
    kept = SnapshotReader(keep.files(coach.save(keep)))
    other.restore(kept.state, kept)
    assert (other.drafter_version, other.head_version) == (coach.drafter_version, coach.head_version)
    assert saved(other) == saved(coach)
    other.watch_again(completed(0))
    assert saved(other) == saved(coach), "what the drift watch knows is in the log"


@every_coach
def test_nothing_happens_before_it_is_asked_for(make: Callable[[], Coach]):
    """Each method is a way through events: what they do is done as they are taken."""
    coach = make()
    started: list[Iterator[Event]] = [coach.floor(), coach.news(), coach.end()]
    assert len(started) == 3
    assert (coach.drafter_version, coach.head_version) == (0, 0)


def remote_of(link: StubLink, *, adopts: bool = True) -> tuple[RemoteCoach, LanguageModel, AcceptanceHead]:
    model = llama(4)
    head = AcceptanceHead(model.hidden_size, 0)
    return RemoteCoach(link, model, head, adopts=adopts), model, head


def newer(seed: int, version: int) -> Weights:
    model = llama(4)
    with torch.no_grad():
        for weight in model.learning:
            weight.add_(0.5 * seed)
    return taken_out(model, AcceptanceHead(model.hidden_size, seed), version, version + 1)


def serves(model: LanguageModel, weights: Weights) -> bool:
    return all(map(torch.equal, model.learning, weights.drafter))


def test_a_remote_coach_takes_news_between_blocks_and_never_else():
    link = StubLink()
    coach, model, _ = remote_of(link)
    weights = newer(1, 3)
    link.waiting.append(weights)
    list(coach.floor())
    list(coach.completed(finished(0)))
    list(coach.end())
    assert coach.drafter_version == 0
    assert not serves(model, weights)
    list(coach.news())
    assert (coach.drafter_version, coach.head_version) == (3, 4)
    assert serves(model, weights)
    list(coach.news())  # nothing new
    assert serves(model, weights)


def test_in_the_shadow_nothing_is_ever_served():
    link = StubLink()
    coach, model, head = remote_of(link, adopts=False)
    before = taken_out(model, head, 0, 0)
    link.waiting.append(newer(1, 3))
    list(coach.news())
    assert link.waiting == [], "they are taken, so that they do not pile up"
    assert serves(model, before)
    assert (coach.drafter_version, coach.head_version) == (0, 0)


def test_a_remote_coach_posts_every_prompt_as_it_is():
    link = StubLink()
    coach, _, _ = remote_of(link)
    prompts = [finished(offset, private=offset == 1) for offset in range(3)]
    for prompt in prompts:
        list(coach.completed(prompt))
    assert link.posted == prompts


def implementations(module: Any) -> set[str]:
    methods = {name for name, value in vars(Coach).items() if inspect.isfunction(value) and name[0] != "_"}
    classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]
    return {cls.__name__ for cls in classes if cls is not Coach and methods <= set(dir(cls))}


def test_no_implementation_is_missing_from_this_suite():
    assert implementations(coach_module) | implementations(remote_module) == set(COACHES)
