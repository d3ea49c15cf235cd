"""Commits are durable: after a power failure at a commit, everything that the manifest names is intact.

Every call of `fsync` is needed: without any one of them, some power failure loses something.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from power_loss import Disk, Site, record_syncs
from synthetic_runs import block, decision, prompt

from store.errors import OmnidraftError
from store.events import PromptRejected
from store.files import digest_of
from store.log.checkpoint import read_checkpoint
from store.log.compaction import compact
from store.log.manifest import MANIFEST, PREVIOUS, part_path, read_manifest, read_manifest_file
from store.log.partitions import open_partition
from store.log.run_log import REJECTED, Commit, RunLog

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
