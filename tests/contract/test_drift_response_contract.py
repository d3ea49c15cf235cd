"""The contracts of `DriftResponse` and `Publisher`, for every implementation: the guarantees for the runner."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from event_making import make_completed, make_drifted
from soft_target_tables import store_tokens
from test_distill_contract import new_distill
from test_stage_contract import llama

from pipeline.learning import drift_response as response_module
from pipeline.learning import publisher as publish_module
from pipeline.learning.drift_response import DriftResponse, NoResponse, Recall, ResetHead, VersionSource
from pipeline.learning.publisher import FolderPublisher, NoPublisher, Numbers, Origin, Publisher
from stages.contract.blocks import TrainingExample
from store.events import Recalled, VersionPublished


def example_of(offset: int) -> TrainingExample:
    soft_targets = store_tokens(*((position, {(0,): 0.7, (2,): 0.2}) for position in (1, 2, 3)))
    return TrainingExample(offset, "big", (0, 1, 2, offset % 4), soft_targets, (), (), 3)


def recall(folder: Path) -> Recall:
    weights = [weight.detach().clone() for weight in llama(4).trained_weights]
    versions = VersionSource(lambda: [(0, folder)], lambda folder: weights, lambda folder: None)
    return Recall(new_distill(), versions, margin=0.02, most=3)


RESPONSES: dict[str, Callable[[Path], DriftResponse]] = {
    "NoResponse": lambda folder: NoResponse(),
    "ResetHead": lambda folder: ResetHead(new_distill().reset_head),
    "Recall": recall,
}
every_response = pytest.mark.parametrize("make", RESPONSES.values(), ids=list(RESPONSES))


@every_response
def test_a_drift_is_handled_with_and_without_observed_examples(make: Callable[[Path], DriftResponse], tmp_path: Path):
    response = make(tmp_path)
    assert list(response.respond(make_drifted(offset=0))) == []
    for offset in range(5):
        list(response.observe(example_of(offset)))
    for event in response.respond(make_drifted(offset=4, changed_at=2, target="big")):
        assert isinstance(event, Recalled)
        assert (event.offset, event.target) == (4, "big")
    list(response.respond(make_drifted(offset=4, changed_at=2)))  # a repeated drift is handled too


@every_response
def test_observing_and_responding_draw_no_global_random_numbers(make: Callable[[Path], DriftResponse], tmp_path: Path):
    response, before = make(tmp_path), torch.random.get_rng_state()
    assert list(response.observe(example_of(0))) == []
    list(response.respond(make_drifted(offset=0)))
    assert torch.equal(torch.random.get_rng_state(), before)


def folder_publisher(folder: Path) -> FolderPublisher:
    learned = count()

    def write(version: Path) -> None:
        version.mkdir(parents=True)
        (version / "model.safetensors").write_bytes(version.name.encode())

    origin = Origin("omnidraft-drafter", "tuesday", "big", "drafter", "ab" * 32)
    sizes = {"head": 0, "cache": 0, "cache_entries": 0, "memory_tokens": 0}
    versions: Callable[[], Any] = lambda: {"drafter": next(learned), **sizes}  # noqa: E731  (always something new)
    return FolderPublisher(folder, write, versions, origin, 2, Numbers(), lambda: "2026-01-02T03:04:05Z")


PUBLISHERS: dict[str, Callable[[Path], Publisher]] = {
    "NoPublisher": lambda folder: NoPublisher(),
    "FolderPublisher": folder_publisher,
}
every_publisher = pytest.mark.parametrize("make", PUBLISHERS.values(), ids=list(PUBLISHERS))


@every_publisher
def test_each_published_version_has_its_own_folder_and_the_previous_version_as_parent(
    make: Callable[[Path], Publisher], tmp_path: Path
):
    publisher = make(tmp_path)
    events: list[VersionPublished] = [*publisher.publish_baseline()]
    for offset in range(5):
        events += publisher.publish_if_due(make_completed(offset))
        events += publisher.publish_on_drift(make_drifted(offset=offset)) if offset == 3 else ()
    events += publisher.end()
    assert [event.version for event in events] == list(range(len(events)))
    assert [event.parent for event in events] == [None, *range(len(events) - 1)][: len(events)]
    assert {event.target for event in events} <= {"big"}
    assert all((tmp_path / event.folder / "model.safetensors").is_file() for event in events)
    assert len({event.folder for event in events}) == len(events)


@every_publisher
def test_nothing_is_written_before_events_are_consumed(make: Callable[[Path], Publisher], tmp_path: Path):
    publisher = make(tmp_path)
    started: Sequence[Iterator[VersionPublished]] = [
        publisher.publish_baseline(),
        publisher.publish_on_drift(make_drifted()),
        publisher.end(),
    ]
    assert len(started) == 3
    assert list(tmp_path.iterdir()) == [], "a version is written when its event is consumed"


def implementations(module: Any, protocol: type) -> set[str]:
    """Classes of a module that have all of the protocol's methods."""
    methods = {name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}
    classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]
    return {cls.__name__ for cls in classes if cls is not protocol and methods <= set(dir(cls))}


def test_no_implementation_is_missing_from_this_suite():
    assert implementations(response_module, DriftResponse) == set(RESPONSES)
    assert implementations(publish_module, Publisher) == set(PUBLISHERS)
