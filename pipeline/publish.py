"""Versions: when the drafter, its head and its n-gram cache become one, and where it goes."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from pipeline.records import Versions
from stages.snapshot import Json
from store.events import Drifted, PromptCompleted, VersionPublished
from store.registry import Registry
from store.version_folder import ManifestFields, seal

VERSIONS = "versions"  # below the run's folder


class Publisher(Protocol):
    """Called by the loop in stream order; each method yields what it published, usually nothing."""

    def floor(self) -> Iterator[VersionPublished]:
        """Before the first prompt."""
        ...

    def at(self, drifted: Drifted) -> Iterator[VersionPublished]:
        """At a drift, before anything is done about it."""
        ...

    def after(self, prompt: PromptCompleted) -> Iterator[VersionPublished]:
        """After a completed prompt and whatever was learned from it."""
        ...

    def end(self) -> Iterator[VersionPublished]:
        """Behind the last prompt."""
        ...

    def save(self) -> Json:
        """See `stages.snapshot`."""
        ...

    def restore(self, saved: Json) -> None:
        """See `stages.snapshot`."""
        ...


class NoPublisher:
    """Publishes nothing."""

    def floor(self) -> Iterator[VersionPublished]:
        """Nothing."""
        return iter(())

    def at(self, drifted: Drifted) -> Iterator[VersionPublished]:
        """Nothing."""
        return iter(())

    def after(self, prompt: PromptCompleted) -> Iterator[VersionPublished]:
        """Nothing."""
        return iter(())

    def end(self) -> Iterator[VersionPublished]:
        """Nothing."""
        return iter(())

    def save(self) -> Json:
        """Nothing to keep."""
        return None

    def restore(self, saved: Json) -> None:
        """Nothing was kept."""


class Numbers:
    """Counts the versions of a run, which its publishers share."""

    def __init__(self) -> None:
        self.next = 0

    def take(self) -> int:
        """The next number."""
        self.next += 1
        return self.next - 1


@dataclass(frozen=True)
class Origin:
    """What every version of a lane has in common, for its manifest."""

    name: str
    run: str
    target: str
    drafter: str
    pair: str


class FolderPublisher:
    """Writes versions to the run's folder, seals them, and hands them to the registry.

    The folder is complete and sealed before the event is yielded; the registry is a replica.

    Args:
        run_folder: versions go to its `versions/`.
        write: puts the drafter, head and cache as they now are into a new folder.
        state: the counters in service and the number of cached n-grams.
        origin: for the manifest.
        registry: where versions are registered.
        interval: completed prompts between two versions.
        numbers: gives the next version its number; publishers of one run share it.
        probe: measures the drafter as it is on what never changes, by name.
        now: the time as ISO 8601, UTC.
    """

    def __init__(
        self,
        run_folder: Path,
        write: Callable[[Path], None],
        state: Callable[[], tuple[Versions, int]],
        origin: Origin,
        registry: Registry,
        interval: int,
        numbers: Numbers,
        now: Callable[[], str],
        probe: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._probe = probe
        self._run_folder, self._write, self._state = run_folder, write, state
        self._origin, self._registry, self._interval, self._now = origin, registry, interval, now
        self._numbers = numbers
        self._folders: list[tuple[int, Path]] = []
        self._published: Versions | None = None
        self._prompts = self._judged = self._accepted = 0
        self._offset = 0
        self._drift: int | None = None  # offset of one that no version has answered yet

    def floor(self) -> Iterator[VersionPublished]:
        """The drafter as it was loaded: version 0, what learning is compared with."""
        yield self._publish("floor")

    def at(self, drifted: Drifted) -> Iterator[VersionPublished]:
        """What was in service when the drift was noticed, unless it is a version already."""
        if self._state()[0] != self._published:
            yield self._publish("drift")
        self._drift = drifted.offset

    def after(self, prompt: PromptCompleted) -> Iterator[VersionPublished]:
        """Every `interval` prompts."""
        self._prompts += 1
        self._judged += prompt.judged
        self._accepted += prompt.accepted
        self._offset = max(self._offset, prompt.offset)
        if self._prompts >= self._interval:
            yield self._publish("interval")

    @property
    def folders(self) -> Sequence[tuple[int, Path]]:
        """Number and folder of the versions so far, oldest first."""
        return tuple(self._folders)

    def end(self) -> Iterator[VersionPublished]:
        """The last state, unless it is a version already."""
        if self._state()[0] != self._published:
            yield self._publish("end")

    def save(self) -> Json:
        """See `stages.snapshot`."""
        return {
            "numbers": self._numbers.next,
            "folders": [[number, folder.name] for number, folder in self._folders],
            "published": self._published and asdict(self._published),
            "counts": [self._prompts, self._judged, self._accepted, self._offset],
            "drift": self._drift,
        }

    def restore(self, saved: Json) -> None:
        """See `stages.snapshot`."""
        self._numbers.next = saved["numbers"]
        self._folders = [(number, self._run_folder / VERSIONS / name) for number, name in saved["folders"]]
        self._published = Versions(**saved["published"]) if saved["published"] else None
        self._prompts, self._judged, self._accepted, self._offset = saved["counts"]
        self._drift = saved["drift"]

    def _publish(self, reason: str) -> VersionPublished:
        versions, entries = self._state()
        number, parent = self._numbers.take(), self._folders[-1][0] if self._folders else None
        folder = self._run_folder / VERSIONS / f"{number:06d}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it could commit
        self._write(folder)
        acceptance = self._accepted / self._judged if self._judged else None
        digest = seal(folder, self._manifest(number, parent, versions, entries))
        event = VersionPublished(
            offset=self._offset,
            version=number,
            target=self._origin.target,
            parent=parent,
            reason=reason,
            drafter_version=versions.drafter,
            head_version=versions.head,
            cache_version=versions.cache,
            cache_entries=entries,
            acceptance=acceptance,
            folder=str(folder.relative_to(self._run_folder)),
            digest=digest,
        )
        self._registry.publish(folder, event, self._metrics(), drift=self._drift)
        self._drift = None
        self._folders.append((number, folder))
        self._published = versions
        self._prompts = self._judged = self._accepted = 0
        return event

    def _metrics(self) -> Mapping[str, float]:
        return {"prompts": float(self._prompts), "judged": float(self._judged), **self._probe()}

    def _manifest(self, number: int, parent: int | None, versions: Versions, entries: int) -> ManifestFields:
        return {
            "name": self._origin.name,
            "version": number,
            "parent": parent,
            "run": self._origin.run,
            "offset": self._offset,
            "target": self._origin.target,
            "drafter": self._origin.drafter,
            "pair": self._origin.pair,
            "counters": {
                "drafter": versions.drafter,
                "head": versions.head,
                "cache": versions.cache,
                "cache_entries": entries,
            },
            "created_at": self._now(),
        }
