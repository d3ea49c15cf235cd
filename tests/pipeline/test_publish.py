"""Publishing: when a version is made, what it says of itself, and that its folder can be trusted."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from event_making import completed

from pipeline.publish import FolderPublisher, NoPublisher, Origin
from pipeline.records import Versions
from store.events import Drifted, VersionPublished
from store.registry import NoRegistry
from store.version_folder import open_version

ORIGIN = Origin("omnidraft-drafter", "tuesday", "builtin:target", "builtin:drafter", "ab" * 32)


class Registered(NoRegistry):
    """Keeps what was published, after a look at the folder as it then was."""

    def __init__(self) -> None:
        self.published: list[tuple[VersionPublished, dict[str, float]]] = []

    def publish(self, folder: Path, event: VersionPublished, metrics: Mapping[str, float]) -> None:
        assert open_version(folder)["digest"] == event.digest
        self.published.append((event, dict(metrics)))


class Drafter:
    """Stands for the models: three counters, and a file that tells them."""

    def __init__(self) -> None:
        self.versions, self.entries = Versions(0, 0, 0), 0

    def learn(self) -> None:
        self.versions = Versions(self.versions.drafter + 1, self.versions.head + 2, self.versions.cache + 3)
        self.entries += 5

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(str(self.versions))

    def state(self) -> tuple[Versions, int]:
        return self.versions, self.entries


@pytest.fixture
def drafter() -> Drafter:
    return Drafter()


@pytest.fixture
def registry() -> Registered:
    return Registered()


@pytest.fixture
def publisher(drafter: Drafter, registry: Registered, tmp_path: Path) -> FolderPublisher:
    now = iter(f"2026-01-02T03:04:{second:02}+00:00" for second in range(60))
    return FolderPublisher(tmp_path, drafter.write, drafter.state, ORIGIN, registry, 3, lambda: next(now))


def only(events: Iterator[VersionPublished]) -> VersionPublished:
    (event,) = events
    return event


def drift(action: str) -> Drifted:
    return Drifted(0, "docs", "adwin", "fall", 0.8, 0.3, action)


def test_the_floor_is_version_zero_without_a_parent(publisher: FolderPublisher):
    floor = only(publisher.floor())
    assert (floor.version, floor.parent, floor.reason, floor.offset) == (0, None, "floor", 0)
    assert (floor.acceptance, floor.folder) == (None, "versions/000000")


def test_a_version_every_interval(publisher: FolderPublisher, drafter: Drafter):
    list(publisher.floor())
    found = []
    for offset in range(7):
        drafter.learn()
        found += publisher.after(completed(offset), None)
    assert [(event.offset, event.version, event.parent, event.reason) for event in found] == [
        (2, 1, 0, "interval"),
        (5, 2, 1, "interval"),
    ]
    assert [event.drafter_version for event in found] == [3, 6]
    assert (found[0].head_version, found[0].cache_version, found[0].cache_entries) == (6, 9, 15)


def test_a_drift_that_is_acted_upon_makes_a_version_and_begins_the_interval_anew(publisher: FolderPublisher):
    list(publisher.floor())
    assert only(publisher.after(completed(0), drift("reset"))).reason == "drift"
    assert [list(publisher.after(completed(offset), None)) for offset in (1, 2)] == [[], []]
    assert only(publisher.after(completed(3), None)).reason == "interval"


@pytest.mark.parametrize("action", ["ignored", "cooldown"])
def test_other_alarms_make_no_version(publisher: FolderPublisher, action: str):
    list(publisher.floor())
    assert list(publisher.after(completed(0), drift(action))) == []


def test_the_acceptance_is_that_since_the_version_before(publisher: FolderPublisher, registry: Registered):
    list(publisher.floor())
    for offset, accepted in enumerate((5, 10, 15, 1, 2, 3)):
        list(publisher.after(completed(offset, judged=20, accepted=accepted), None))
    assert [event.acceptance for event, _ in registry.published] == [None, 30 / 60, 6 / 60]
    assert [metrics for _, metrics in registry.published][1:] == [{"prompts": 3.0, "judged": 60.0}] * 2


def test_a_stream_with_nothing_judged_has_no_acceptance(publisher: FolderPublisher):
    list(publisher.floor())
    events = [event for offset in range(3) for event in publisher.after(completed(offset, judged=0, accepted=0), None)]
    assert only(iter(events)).acceptance is None


def test_the_end_is_published_only_if_something_changed(publisher: FolderPublisher, drafter: Drafter):
    list(publisher.floor())
    assert list(publisher.end()) == []
    drafter.learn()
    list(publisher.after(completed(0), None))
    end = only(publisher.end())
    assert (end.reason, end.version, end.parent, end.offset) == ("end", 1, 0, 0)
    assert list(publisher.end()) == []


def test_the_folder_is_sealed_and_says_where_it_came_from(publisher: FolderPublisher, drafter: Drafter, tmp_path: Path):
    list(publisher.floor())
    drafter.learn()
    event = only(publisher.after(completed(41), drift("reset")))
    manifest = open_version(tmp_path / event.folder)
    assert manifest["digest"] == event.digest
    assert list(manifest["files"]) == ["model.safetensors"]
    assert (manifest["version"], manifest["parent"], manifest["offset"], manifest["run"]) == (1, 0, 41, "tuesday")
    assert (manifest["target"], manifest["drafter"]) == ("builtin:target", "builtin:drafter")
    assert (manifest["name"], manifest["pair"]) == ("omnidraft-drafter", "ab" * 32)
    assert manifest["counters"] == {"drafter": 1, "head": 2, "cache": 3, "cache_entries": 5}
    assert manifest["created_at"] == "2026-01-02T03:04:01+00:00"


def test_earlier_versions_stay_as_they_are(publisher: FolderPublisher, drafter: Drafter, tmp_path: Path):
    floor = only(publisher.floor())
    drafter.learn()
    later = only(publisher.end())
    assert open_version(tmp_path / floor.folder)["digest"] == floor.digest != later.digest


def test_the_registry_gets_every_version_in_order(publisher: FolderPublisher, drafter: Drafter, registry: Registered):
    made = list(publisher.floor())
    drafter.learn()
    made += publisher.after(completed(0), drift("reset"))
    drafter.learn()
    made += publisher.end()
    assert [event for event, _ in registry.published] == made


def test_no_publisher_publishes_nothing():
    nothing = NoPublisher()
    assert [*nothing.floor(), *nothing.after(completed(0), drift("reset")), *nothing.end()] == []
