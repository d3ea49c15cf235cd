"""Commits are durable: after a power failure at a commit, everything that the manifest names is intact.

Every call of `fsync` is needed: without any one of them, some power failure loses something. Only what it was called
for is on the disk: of a file its content, of a folder its entries. That is the worst that a file system may do which
keeps its promises. Another one keeps all entries of folders at once, so that a file may have its new name but not its
content.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
from synthetic_runs import block, decision, prompt

from store.errors import OmnidraftError
from store.events import PromptRejected
from store.files import digest_of
from store.log.checkpoint import read_checkpoint
from store.log.compaction import compact
from store.log.manifest import MANIFEST, PREVIOUS, part_path, read_manifest, read_manifest_file
from store.log.partitions import open_partition
from store.log.run_log import REJECTED, Commit, RunLog

Site = tuple[str, ...]  # what is synced, then the functions of the store that led there, the innermost first
NAMED = ("checkpoint", "log", "partitions", "run", "runs")  # folders that each count as a place of their own


@dataclass
class Disk:
    """The synced files and entries below a folder. The folder and its own entries are on the disk already.

    Attributes:
        root: the folder.
        skipped: calls from here are not made.
        sites: where calls came from.
        observe: called after each call, and after each `os.replace` and `os.rename`.
    """

    root: Path
    skipped: Site | None = None
    sites: set[Site] = field(default_factory=set)
    observe: Callable[[], None] = lambda: None
    _contents: dict[int, bytes] = field(default_factory=dict)  # by inode
    _entries: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)  # inode and whether it is a folder
    _held: dict[int, int] = field(default_factory=dict)  # open descriptors, so that no inode is given to another file

    def sync(self, descriptor: int) -> None:
        """In place of `os.fsync`."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        site = find_site(path)
        self.sites.add(site)
        if site == self.skipped:
            return
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            self._entries[inode] = list_entries(path)
            for name in self._entries[inode]:
                self._hold(path / name)
        else:
            self._contents[inode] = path.read_bytes()
        self._hold(path)
        self.observe()

    def _hold(self, path: Path) -> None:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)

    def rename(self, rename: Callable[..., None]) -> Callable[..., None]:
        """In place of `os.replace` and `os.rename`."""

        def call(*names: object, **options: object) -> None:
            rename(*names, **options)
            self.observe()

        return call

    def fail(self, into: Path, *, all_entries: bool = False) -> Path:
        """Write what is left after a power failure; return its folder. With `all_entries`, folders have their entries
        without being synced.
        """
        self._write(list_entries(self.root), into, self.root if all_entries else None)
        return into

    def _write(self, entries: dict[str, tuple[int, bool]], into: Path, source: Path | None) -> None:
        into.mkdir(parents=True)
        for name, (inode, is_folder) in entries.items():
            if is_folder and source:
                self._write(list_entries(source / name), into / name, source / name)
            elif is_folder:
                self._write(self._entries.get(inode, {}), into / name, None)
            else:
                (into / name).write_bytes(self._contents.get(inode, b""))

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self._held.values():
            os.close(descriptor)


def list_entries(folder: Path) -> dict[str, tuple[int, bool]]:
    with os.scandir(folder) as entries:
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}


def find_site(synced: Path) -> Site:
    """Return from where the store calls `os.fsync`, and what for."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 4:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if "/store/" in name and "/tests/" not in name:
            found.append(f"{name.rpartition('/store/')[2]}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    what = "file" if synced.is_file() else synced.name if synced.name in NAMED else "folder"
    return (what, *found)


@contextmanager
def record_syncs(root: Path, skipped: Site | None = None, observe: Callable[[], None] = lambda: None) -> Iterator[Disk]:
    """Record every `os.fsync` below a new folder; with `skipped`, leave out the calls from one place. `observe` as of
    `Disk`.
    """
    if not Path("/proc/self/fd").exists():
        pytest.skip("the files of descriptors are read from /proc, which this system has not")
    (root / "runs").mkdir(parents=True)
    disk = Disk(root, skipped, observe=observe)
    renamed = {name: disk.rename(getattr(os, name)) for name in ("replace", "rename")}
    with patch.object(os, "fsync", disk.sync), patch.multiple(os, **renamed):
        yield disk
    disk.close()


RUN = Path("runs", "run")


class Failures:
    """Power failures in a scenario. Each leaves its own disk image."""

    def __init__(self, disk: Disk, images: Path) -> None:
        self.disk, self._images, self._numbers = disk, images, count()
        self.run = disk.root / RUN

    def fail(self) -> Path:
        """Simulate a power failure now. Returns the folder of the disk after it."""
        return self.disk.fail(self._images / str(next(self._numbers)))

    def check(self, place: Path = RUN) -> None:
        """Require that a power failure now would not change a log."""
        log, left = self.disk.root / place, self.fail() / place
        for name in (MANIFEST, PREVIOUS):
            assert (left / name).exists() == (log / name).exists()
            if (log / name).exists():
                assert read_manifest_file(left / name) == read_manifest_file(log / name)
        require_all_files(left)


def require_all_files(log: Path) -> None:
    """Require everything that the manifest and the one before it name."""
    for manifest in (read_manifest_file(log / name) for name in (MANIFEST, PREVIOUS) if (log / name).exists()):
        for part in (part for parts in manifest.tables.values() for part in parts):
            assert digest_of(part_path(log, part)) == part.sha256, part.file
        if manifest.checkpoint:
            assert read_checkpoint(log, manifest.checkpoint)
        if manifest.rejected_bytes:
            assert (log / REJECTED).stat().st_size >= manifest.rejected_bytes


def append(log: RunLog, offset: int) -> None:
    for event in (decision(offset=offset), block(offset=offset), prompt(offset=offset)):
        log.append(event)
    log.append(PromptRejected("docs", offset, "empty"))


def commit(log: RunLog, offset: int) -> None:
    append(log, offset)
    log.commit(Commit(lambda: {"state.json": b"%d" % offset, "tensors": b"x" * 100}), wait=True)


def write_log(failures: Failures) -> None:
    log = RunLog(failures.run)
    failures.check()
    for offset in range(2):
        commit(log, offset)
        failures.check()
    append(log, 2)
    log.finish()
    failures.check()


def write_log_with_one_commit(failures: Failures) -> None:
    log = RunLog(failures.run)
    append(log, 0)
    log.finish()
    failures.check()


def resume_killed_log(failures: Failures) -> None:
    log = RunLog(failures.run, part_rows=1)
    commit(log, 0)
    log.append(decision(offset=1))
    log._jobs.join()
    log.close()
    RunLog(failures.run).close()
    failures.check()
    parts = list((failures.fail() / RUN / "log" / "decisions").iterdir())
    assert [path.name for path in parts] == ["part-000001.parquet"], "the second was not committed"


def join_parts(failures: Failures) -> None:
    log = RunLog(failures.run)
    for offset in range(3):
        commit(log, offset)
    log.close()
    compact(failures.run, rows=10, counted=1)
    failures.check()
    compact(failures.run, rows=10, counted=1, grace=-1)
    failures.check()


def write_partition(failures: Failures) -> None:
    RunLog(failures.run).close()
    place = RUN / "partitions" / "worker-000"
    folder = open_partition(failures.run, "worker-000")
    failures.check(place)
    log = RunLog(folder)
    commit(log, 0)
    failures.check(place)
    log.close()


Scenario = Callable[[Failures], None]
SCENARIOS: list[Scenario] = [write_log, write_log_with_one_commit, resume_killed_log, join_parts, write_partition]


def play(scenario: Scenario, folder: Path, skipped: Site | None = None) -> set[Site]:
    """Play a scenario on a new disk. Returns the places that called `fsync`."""
    with record_syncs(folder / "disk", skipped) as disk:
        scenario(Failures(disk, folder / "images"))
    return disk.sites


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_failure_loses_nothing_that_was_committed(tmp_path: Path, scenario: Scenario):
    assert len(play(scenario, tmp_path)) >= 4


# Power failures inside a commit leave either the previous commit or the new one, in full.


def committed_prompts(root: Path) -> dict[str, int]:
    """Number of prompts in each manifest below a folder, by run or partition."""
    found = {}
    for path in root.rglob(MANIFEST.as_posix()):
        log = path.parent.parent
        found[log.relative_to(root).as_posix()] = sum(part.rows for part in read_manifest(log).tables["prompts"])
    return found


@dataclass
class Points:
    """Images of the disk after every step of a scenario.

    Attributes:
        images: each with the permitted numbers of prompts: those of the current and of the previous manifest.
    """

    root: Path
    folder: Path
    all_entries: bool
    disk: Disk | None = None
    images: list[tuple[Path, dict[str, set[int]]]] = field(default_factory=list)
    _counts: dict[str, list[int]] = field(default_factory=dict)

    def observe(self) -> None:
        assert self.disk
        for name, prompts in committed_prompts(self.root).items():
            counts = self._counts.setdefault(name, [0])
            if counts[-1] != prompts:
                counts.append(prompts)
        image = self.disk.fail(self.folder / str(len(self.images)), all_entries=self.all_entries)
        self.images.append((image, {name: set(counts[-2:]) for name, counts in self._counts.items()}))


def require_whole(image: Path, allowed: dict[str, set[int]]) -> None:
    """Require that everything that a manifest names exists, and that the run can be reopened unchanged."""
    for name, prompts in committed_prompts(image).items():
        log = image / name
        manifest = read_manifest(log)
        assert prompts in allowed[name], f"{prompts} prompts after a failure, permitted: {allowed[name]}"
        require_all_files(log)
        if not manifest.finished:
            RunLog(log).close()
            require_all_files(log)
            assert committed_prompts(image)[name] == prompts


def require_all_whole(points: Points) -> None:
    for image, allowed in points.images:
        require_whole(image, allowed)


@pytest.mark.parametrize("all_entries", [False, True], ids=["what was synced", "all names"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_failure_at_any_point_leaves_one_of_two_commits(tmp_path: Path, scenario: Scenario, all_entries: bool):
    points = Points(tmp_path / "disk", tmp_path / "points", all_entries)
    with record_syncs(points.root, observe=points.observe) as points.disk:
        scenario(Failures(points.disk, tmp_path / "images"))
    assert len(points.images) >= 8
    require_all_whole(points)
    assert sum(len(counts) - 1 for counts in points._counts.values()) >= 1, "something was committed"


def is_needed(site: Site, scenario: Scenario, folder: Path) -> bool:
    """Whether a scenario loses data if one place does not call `fsync`."""
    try:
        play(scenario, folder, site)
    except (AssertionError, OmnidraftError, OSError):
        return True
    return False


def test_every_fsync_is_needed(tmp_path: Path):
    sites = {scenario: play(scenario, tmp_path / scenario.__name__) for scenario in SCENARIOS}
    numbers, survivors = count(), []
    for site in sorted(set.union(*sites.values())):
        where = [scenario for scenario in SCENARIOS if site in sites[scenario]]
        if not any(is_needed(site, scenario, tmp_path / str(next(numbers))) for scenario in where):
            survivors.append(site)
    assert survivors == []
