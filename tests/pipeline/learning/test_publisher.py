"""Publishing: when a version is made, what its manifest records, and that its folder is complete."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from event_making import make_completed
from event_making import make_drifted as drift

from pipeline.learning.publisher import DrafterFiles, FolderPublisher, Numbers, Origin
from stages.learn.training.probe import ProbeResult
from store.events import VersionPublished
from store.registry.version_folder import ManifestFields, VersionManifest, open_version, seal

FIELDS = ManifestFields(
    name="d",
    version=0,
    parent=None,
    run="r",
    offset=0,
    target="t",
    drafter="d",
    pair="p",
    counters={},
    created_at="",
    drift=None,
    metrics={},
)
ORIGIN = Origin("omnidraft-drafter", "tuesday", "builtin:target", "builtin:drafter", "ab" * 32)


class Drafter:
    """A double of the models: counters, and files that hold them."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(("drafter", "head", "cache", "cache_entries", "memory_tokens"), 0)

    def learn(self, **more: int) -> None:
        for name, count in (more or {"drafter": 1, "head": 2, "cache": 3, "cache_entries": 5}).items():
            self.counters[name] += count

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(str(self.counters["drafter"]))
        (folder / "head.safetensors").write_text(str(self.counters["head"]))
        (folder / "memory.safetensors").write_text(str(self.counters["memory_tokens"]))
        (folder / "ngrams.parquet").write_text(str(self.counters["cache"]))

    def state(self) -> dict[str, int]:
        return self.counters


@pytest.fixture
def drafter() -> Drafter:
    return Drafter()


@pytest.fixture
def publisher(drafter: Drafter, tmp_path: Path) -> FolderPublisher:
    now = iter(f"2026-01-02T03:04:{second:02}+00:00" for second in range(60))
    return FolderPublisher(tmp_path, drafter.write, drafter.state, ORIGIN, 3, Numbers(), lambda: next(now))


def manifests(folder: Path, events: list[VersionPublished]) -> list[VersionManifest]:
    """The manifests of versions whose files are as they were sealed."""
    found = [open_version(folder / event.folder) for event in events]
    assert [manifest["digest"] for manifest in found] == [event.digest for event in events]
    return found


def only(events: Iterator[VersionPublished]) -> VersionPublished:
    (event,) = events
    return event


def test_the_baseline_is_version_zero_without_a_parent(publisher: FolderPublisher):
    baseline = only(publisher.publish_baseline())
    assert (baseline.version, baseline.parent, baseline.reason, baseline.offset) == (0, None, "baseline", 0)
    assert (baseline.acceptance, baseline.folder) == (None, "versions/000000")


def test_a_version_every_interval(publisher: FolderPublisher, drafter: Drafter):
    list(publisher.publish_baseline())
    found = []
    for offset in range(7):
        drafter.learn()
        found += publisher.publish_if_due(make_completed(offset))
    assert [(event.offset, event.version, event.parent, event.reason) for event in found] == [
        (2, 1, 0, "interval"),
        (5, 2, 1, "interval"),
    ]
    assert [event.drafter_version for event in found] == [3, 6]
    assert (found[0].head_version, found[0].cache_version, found[0].cache_entries) == (6, 9, 15)


def test_a_drift_publishes_what_was_in_service_and_restarts_the_interval(publisher: FolderPublisher, drafter: Drafter):
    list(publisher.publish_baseline())
    drafter.learn()
    version = only(publisher.publish_on_drift(drift()))
    assert (version.reason, version.drafter_version) == ("drift", 1)
    drafter.learn()
    assert [list(publisher.publish_if_due(make_completed(offset))) for offset in (0, 1)] == [[], []]
    assert only(publisher.publish_if_due(make_completed(2))).reason == "interval"


def test_the_first_version_after_a_drift_answers_it(publisher: FolderPublisher, drafter: Drafter, tmp_path: Path):
    events = list(publisher.publish_baseline())
    drafter.learn()
    events += publisher.publish_on_drift(drift(description="drift at prompt 7"))
    for offset in range(8, 14):
        drafter.learn()
        events += publisher.publish_if_due(make_completed(offset))
    answered = [manifest["drift"] for manifest in manifests(tmp_path, events)]
    assert [event.reason for event in events] == ["baseline", "drift", "interval", "interval"]
    assert answered == [None, None, "drift at prompt 7", None]


def test_the_acceptance_is_that_since_the_version_before(publisher: FolderPublisher, drafter: Drafter, tmp_path: Path):
    events = list(publisher.publish_baseline())
    for offset, accepted in enumerate((5, 10, 15, 1, 2, 3)):
        drafter.learn()
        events += publisher.publish_if_due(make_completed(offset, judged=20, accepted=accepted))
    assert [event.acceptance for event in events] == [None, 30 / 60, 6 / 60]
    window = {"window_prompts": 3.0, "window_judged": 60.0}
    metrics = [manifest["metrics"] for manifest in manifests(tmp_path, events)]
    assert metrics[1:] == [window | {"window_acceptance": rate} for rate in (0.5, 0.1)]


def test_the_end_is_published_only_if_something_changed(publisher: FolderPublisher, drafter: Drafter):
    list(publisher.publish_baseline())
    assert list(publisher.end()) == []
    drafter.learn()
    list(publisher.publish_if_due(make_completed(0)))
    end = only(publisher.end())
    assert (end.reason, end.version, end.parent, end.offset) == ("end", 1, 0, 0)
    assert list(publisher.end()) == []


def test_the_folder_is_sealed_and_records_its_origin(publisher: FolderPublisher, drafter: Drafter, tmp_path: Path):
    list(publisher.publish_baseline())
    drafter.learn()
    list(publisher.publish_if_due(make_completed(41)))
    event = only(publisher.end())
    manifest = open_version(tmp_path / event.folder)
    assert manifest["digest"] == event.digest
    assert "model.safetensors" in manifest["files"]
    assert (manifest["version"], manifest["parent"], manifest["offset"], manifest["run"]) == (1, 0, 41, "tuesday")
    assert (manifest["target"], manifest["drafter"]) == ("builtin:target", "builtin:drafter")
    assert (manifest["name"], manifest["pair"]) == ("omnidraft-drafter", "ab" * 32)
    assert manifest["counters"] == drafter.counters
    assert manifest["created_at"] == "2026-01-02T03:04:01+00:00"


def test_versions_of_several_targets_share_their_numbers_but_not_their_parents(tmp_path: Path):
    """Each target's first version is its baseline."""
    numbers, drafters, publishers = Numbers(), {}, {}
    for name in ("big", "small"):
        drafters[name] = drafter = Drafter()
        origin = replace(ORIGIN, target=name)
        publishers[name] = FolderPublisher(
            tmp_path, drafter.write, drafter.state, origin, 1, numbers, lambda: "2026-01-02T03:04:05+00:00"
        )
    found = [only(publishers[name].publish_baseline()) for name in publishers]
    for offset, name in enumerate(("small", "big", "small")):
        drafters[name].learn()
        found.append(only(publishers[name].publish_if_due(make_completed(offset, target=name))))
    assert [(event.target, event.version, event.parent) for event in found] == [
        ("big", 0, None),
        ("small", 1, None),
        ("small", 2, 1),
        ("big", 3, 0),
        ("small", 4, 2),
    ]
    assert len({event.folder for event in found}) == 5
    folders = [(event.version, tmp_path / event.folder) for event in found if event.target == "small"]
    assert list(publishers["small"].folders) == folders, "oldest first"


def test_the_probe_measures_a_drafter_once(drafter: Drafter, tmp_path: Path):
    """Its result depends on the drafter alone, and a measurement takes a tenth of a second or more."""
    measured: list[int] = []

    def probe() -> ProbeResult:
        measured.append(drafter.counters["drafter"])
        return ProbeResult({"acceptance": drafter.counters["drafter"] / 10})

    publisher = FolderPublisher(
        tmp_path, drafter.write, drafter.state, ORIGIN, 1, Numbers(), lambda: "2026-01-02", probe
    )
    events = [*publisher.publish_baseline()]
    for offset, part in enumerate(("head", "drafter", "head")):
        drafter.learn(**{part: 1})
        events += publisher.publish_if_due(make_completed(offset))
    assert measured == [0, 1]
    found = [manifest["metrics"]["acceptance"] for manifest in manifests(tmp_path, events)]
    assert found == [0, 0, 0.1, 0.1]


def test_a_version_says_what_changed_and_nothing_is_published_twice(publisher: FolderPublisher, drafter: Drafter):
    """By default the versions of a run without updates of the drafter had the weights of the baseline, untold."""
    events = list(publisher.publish_baseline())
    steps = [{"cache": 53, "cache_entries": 53, "memory_tokens": 1728}, {"drafter": 1, "head": 2}, {}, {"cache": 4}]
    for step in steps:
        drafter.counters |= {name: drafter.counters[name] + count for name, count in step.items()}
        events += publisher.publish_on_drift(drift())
    assert [event.changes for event in events] == [
        "the drafter as it was loaded",
        "drafter unchanged; n-grams +53, memory +1,728 tokens",
        "drafter +1 update; head +2 updates",
        "drafter unchanged; n-grams replaced",
    ]
    drafters = [event.drafter_digest for event in events]
    assert drafters[0] == drafters[1] != drafters[2] == drafters[3]
    assert len({event.digest for event in events}) == len(events)


def test_a_version_with_the_files_of_the_one_before_leaves_no_trace(publisher: FolderPublisher, drafter: Drafter):
    """An update that changed no byte is counted, but nothing is new."""
    list(publisher.publish_baseline())
    publisher._write = lambda folder: Drafter().write(folder)
    drafter.learn(head=1)
    assert list(publisher.end()) == []
    publisher._write = drafter.write
    (event,) = publisher.end()
    assert (event.version, event.parent) == (1, 0)


def test_idle_time_publishes_a_trained_drafter_and_not_after_every_prompt(drafter: Drafter, tmp_path: Path):
    known = ProbeResult, lambda: (0.5, 0.25)
    publisher = FolderPublisher(tmp_path, drafter.write, drafter.state, ORIGIN, 16, Numbers(), lambda: "now", *known)
    list(publisher.publish_baseline())
    found = []
    for offset in range(6):
        found += [*publisher.publish_if_due(make_completed(offset)), *publisher.publish_idle()]
        drafter.learn(**({"head": 1} if offset < 2 else {"drafter": 1}))
    assert [(event.offset, event.reason) for event in found] == [(3, "idle"), (5, "idle")]
    assert found[0].changes == "drafter +1 update (0.500 of held-out tokens, as loaded 0.250); head +2 updates"


def test_an_interval_waits_for_a_change(publisher: FolderPublisher, drafter: Drafter):
    list(publisher.publish_baseline())
    found = []
    for offset in range(5):
        drafter.learn(head=int(offset == 4))
        found += publisher.publish_if_due(make_completed(offset))
    assert [(event.offset, event.reason) for event in found] == [(4, "interval")]


class SavedDrafter:
    """Weights, an adapter, and a counter of updates."""

    def __init__(self) -> None:
        self.version = self.saved = 0

    def save(self, folder: Path) -> None:
        self.saved += 1
        (folder / "adapter").mkdir(parents=True)
        for name in ("model.safetensors", "adapter/weights.safetensors"):
            (folder / name).write_text(f"{name} {self.version}")


def make_version(files: DrafterFiles, folder: Path, head: str) -> dict[str, str]:
    """Write a version as a publisher does, and return its files as they are read again."""
    files.write(folder)
    (folder / "head.safetensors").write_text(head)
    seal(folder, FIELDS)
    return {name: (folder / name).read_text() for name in open_version(folder)["files"]}


def content(version: int, head: str) -> dict[str, str]:
    names = ("model.safetensors", "adapter/weights.safetensors")
    return {name: f"{name} {version}" for name in names} | {"head.safetensors": head}


def test_a_version_has_the_drafter_of_its_time_and_its_own_head(tmp_path: Path):
    drafter = SavedDrafter()
    files = DrafterFiles(drafter.save, lambda: drafter.version)
    for number, updates in enumerate([0, 0, 0, 1, 1, 3]):
        drafter.version = updates
        assert make_version(files, tmp_path / f"{number}", f"head {number}") == content(updates, f"head {number}")
    assert drafter.saved == 3, "once per update that was in service"
    assert (tmp_path / "0" / "model.safetensors").samefile(tmp_path / "2" / "model.safetensors")
    assert open_version(tmp_path / "0")["files"].keys() == content(0, "").keys(), "no file of a later one"


@pytest.mark.parametrize("lost", ["the folder", "a file"])
def test_it_is_written_again_where_the_earlier_version_was_removed(tmp_path: Path, lost: str):
    drafter = SavedDrafter()
    files = DrafterFiles(drafter.save, lambda: drafter.version)
    make_version(files, tmp_path / "0", "a")
    if lost == "the folder":
        shutil.rmtree(tmp_path / "0")
    else:
        (tmp_path / "0" / "adapter" / "weights.safetensors").unlink()
    assert make_version(files, tmp_path / "1", "b") == content(0, "b")
    assert drafter.saved == 2
