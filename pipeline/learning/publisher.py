"""Publishing: when the drafter, its head, its n-gram cache and its memory become a version, and where it is stored."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from stages.contract.snapshot import State
from stages.learn.training.probe import ProbeResult
from store.events import Drifted, PromptCompleted, VersionPublished
from store.files import link_or_copy
from store.registry.version_folder import (
    Counters,
    ManifestFields,
    describe_changes,
    digest_drafter,
    read_manifest,
    seal,
)

VERSIONS = "versions"  # below the run's folder
IDLE_VERSIONS = 8  # at most, of the prompts between two versions by their number: pauses may be many and short


class Publisher:
    """The interface of publishers, called in stream order. Methods yield what they published; here, nothing."""

    def publish_baseline(self) -> Iterable[VersionPublished]:
        """Publish the drafter as it was loaded. Called before the first prompt."""
        return ()

    def publish_on_drift(self, drifted: Drifted) -> Iterable[VersionPublished]:
        """Publish what was in service when a drift was detected. Called before the response to it."""
        return ()

    def publish_if_due(self, prompt: PromptCompleted) -> Iterable[VersionPublished]:
        """Publish a version if one is due. Called after a completed prompt was learned from."""
        return ()

    def publish_idle(self) -> Iterable[VersionPublished]:
        """Publish a drafter that was trained, while nothing else needs the processor."""
        return ()

    def end(self, offset: int | None = None) -> Iterable[VersionPublished]:
        """Publish the last state. Called after the last prompt, or after a training on so many texts."""
        return ()

    def state_dict(self) -> State:
        return None

    def load_state_dict(self, state: State) -> None: ...


class NoPublisher(Publisher):
    """Publishes nothing (`publish.enabled = false`)."""


class Numbers:
    """Numbers the versions of a run; shared by its publishers."""

    def __init__(self) -> None:
        self.next = 0

    def take(self) -> int:
        self.next += 1
        return self.next - 1


@dataclass(frozen=True)
class Origin:
    """Fields of the manifest that all versions of a target share."""

    name: str
    run: str
    target: str
    drafter: str
    pair: str


class FolderPublisher(Publisher):
    """Writes versions to the run's folder and seals them; none that has the content of the one before.

    The folder is complete and sealed before the event is yielded. MLflow gets it once the event is committed.

    Args:
        run_folder: versions go to its `versions/`.
        write: puts the drafter, head, cache and memory as they now are into a new folder.
        state: the counters of what is in service.
        interval: completed prompts between two versions.
        numbers: gives the next version its number; publishers of one run share it.
        probe: measures the drafter as it is on what never changes.
        held_out: returns its acceptance on held-out prompts, and that of the drafter as loaded, where they are known.
    """

    def __init__(
        self,
        run_folder: Path,
        write: Callable[[Path], None],
        state: Callable[[], Counters],
        origin: Origin,
        interval: int,
        numbers: Numbers,
        now: Callable[[], str],
        probe: Callable[[], ProbeResult] = ProbeResult,
        held_out: Callable[[], tuple[float | None, float | None]] = lambda: (None, None),
    ) -> None:
        self._probe, self._held_out = probe, held_out
        self._run_folder, self._write, self._state = run_folder, write, state
        self._origin, self._interval, self._now = origin, interval, now
        self._numbers = numbers
        self._folders: list[tuple[int, Path]] = []
        self._published: tuple[Counters, str, str] | None = None  # with the digests of the drafter and of all files
        self._prompts = self._judged = self._accepted = 0
        self._probed: tuple[int, ProbeResult] | None = None  # of this update of the drafter
        self._offset = 0
        self._drift: str | None = None  # description of a drift after which no version was published yet

    @override
    def publish_baseline(self) -> Iterator[VersionPublished]:
        yield from self._publish("baseline")

    @override
    def publish_on_drift(self, drifted: Drifted) -> Iterator[VersionPublished]:
        yield from self._publish("drift")
        self._drift = drifted.description

    @override
    def publish_if_due(self, prompt: PromptCompleted) -> Iterator[VersionPublished]:
        self._prompts += 1
        self._judged += prompt.judged
        self._accepted += prompt.accepted
        self._offset = max(self._offset, prompt.offset)
        if self._prompts >= self._interval:
            yield from self._publish("interval")

    @override
    def publish_idle(self) -> Iterator[VersionPublished]:
        changed = self._published is None or self._published[0]["drafter"] != self._state()["drafter"]
        if changed and self._prompts * IDLE_VERSIONS >= self._interval:
            yield from self._publish("idle")

    @property
    def folders(self) -> Sequence[tuple[int, Path]]:
        return tuple(self._folders)

    @override
    def end(self, offset: int | None = None) -> Iterator[VersionPublished]:
        self._offset = self._offset if offset is None else offset
        yield from self._publish("end")

    @override
    def state_dict(self) -> State:
        return {
            "next": self._numbers.next,
            "folders": [(number, folder.name) for number, folder in self._folders],
            "published": self._published,
            "counts": (self._prompts, self._judged, self._accepted, self._offset),
            "drift": self._drift,
        }

    @override
    def load_state_dict(self, state: State) -> None:
        self._numbers.next, self._drift, self._published = state["next"], state["drift"], state["published"]
        self._folders = [(number, self._run_folder / VERSIONS / name) for number, name in state["folders"]]
        self._prompts, self._judged, self._accepted, self._offset = state["counts"]

    def _publish(self, reason: str) -> Iterator[VersionPublished]:
        """Publish what is in service, unless it is what the last version holds."""
        before, counters = self._published, dict(self._state())
        if before and before[0] == counters:
            return
        folder = self._run_folder / VERSIONS / f"{self._numbers.next:06d}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it could commit
        self._write(folder)
        if self._probed is None or self._probed[0] != counters["drafter"]:
            self._probed = counters["drafter"], self._probe()
        digest = seal(folder, self._describe(counters, self._probed[1]))
        drafter = digest_drafter(read_manifest(folder))
        changes = "" if self._folders else "the drafter as it was loaded"
        if before:
            changes = describe_changes(
                before[0], counters, drafter_changed=drafter != before[1], held_out=self._held_out()
            )
            if not changes or digest == before[2]:  # such as an update that was taken back
                shutil.rmtree(folder)
                return
        number, parent = self._numbers.take(), self._folders[-1][0] if self._folders else None
        event = VersionPublished(
            offset=self._offset,
            version=number,
            target=self._origin.target,
            parent=parent,
            reason=reason,
            drafter_version=counters["drafter"],
            head_version=counters["head"],
            cache_version=counters["cache"],
            cache_entries=counters["cache_entries"],
            memory_tokens=counters["memory_tokens"],
            acceptance=self._accepted / self._judged if self._judged else None,
            folder=str(folder.relative_to(self._run_folder)),
            digest=digest,
            drafter_digest=drafter,
            changes=changes,
            **_of_probe(self._probed[1]),
        )
        self._drift, self._published = None, (counters, drafter, digest)
        self._folders.append((number, folder))
        self._prompts = self._judged = self._accepted = 0
        yield event

    def _describe(self, counters: Counters, probed: ProbeResult) -> ManifestFields:
        origin, window = self._origin, {"window_prompts": float(self._prompts), "window_judged": float(self._judged)}
        if self._judged:
            window["window_acceptance"] = self._accepted / self._judged
        return {
            "name": origin.name,
            "version": self._numbers.next,
            "parent": self._folders[-1][0] if self._folders else None,
            "run": origin.run,
            "offset": self._offset,
            "target": origin.target,
            "drafter": origin.drafter,
            "pair": origin.pair,
            "counters": counters,
            "created_at": self._now(),
            "drift": self._drift,
            "metrics": {**probed.metrics, **window},
        }


def _of_probe(probed: ProbeResult) -> dict[str, Any]:
    """The fields of `VersionPublished` that the probe measures; none if it measured nothing."""
    scores = probed.scores
    if not scores:
        return {}
    return {
        "probe_tokens": tuple(score.tokens for score in scores),
        "probe_greedy": tuple(round(score.greedy) for score in scores),
        "probe_sampled": tuple(score.sampled for score in scores),
        "probe_forwards": tuple(score.forwards for score in scores),
        "probe_seconds": tuple(probed.seconds) or None,
        "probe_plain_seconds": probed.plain_seconds,
    }


class _Written(NamedTuple):
    version: int
    folder: Path
    names: list[str]


class DrafterFiles:
    """Puts the drafter into the folders of versions, most of which differ in memory, head and n-grams alone.

    Args:
        save: writes the drafter into a folder, which it makes.
        version: the number of updates in service; equal numbers mean equal weights.
    """

    def __init__(self, save: Callable[[Path], None], version: Callable[[], int]) -> None:
        self._save, self._version = save, version
        self._last: _Written | None = None

    def write(self, folder: Path) -> None:
        """Write the drafter into a new folder, or link the files of the last version that has the same one."""
        last, version = self._last, self._version()
        if last and last.version == version and all((last.folder / name).is_file() for name in last.names):
            for name in last.names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(last.folder / name, folder / name)
        else:
            self._save(folder)
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        self._last = _Written(version, folder, names)
