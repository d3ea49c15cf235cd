"""A run whose manifest is lost is repaired from the files that exist, and what cannot be proved is listed."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import block, decision, prompt, small_run_events, write_run

from store.errors import CorruptError, RunError
from store.log.checkpoint import read_checkpoint
from store.log.compaction import compact
from store.log.lock import RunLock
from store.log.manifest import MANIFEST, PREVIOUS, UNREADABLE, Manifest, RunKind, part_path, read_manifest
from store.log.partitions import LEARNER, open_partition
from store.log.run_log import Commit, RunLog
from store.query.log_reader import LogReader
from store.recovery.repair import RepairKind, repair_run

PROMPTS = 3  # per commit
DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "foreign": lambda path: path.write_text("{}"),
    "numbers that are texts": lambda path: path.write_text(path.read_text().replace('"rows": 3', '"rows": "3"')),
}


def append_prompts(log: RunLog, first: int, count: int = PROMPTS) -> None:
    """Append prompts of one accepted token each."""
    for offset in range(first, first + count):
        for event in (decision(offset=offset), block(offset=offset), prompt(offset=offset)):
            log.append(event)


def write_commits(folder: Path, commits: int = 3, kind: RunKind = RunKind.REPLAY) -> list[Manifest]:
    """Write an unfinished log. Returns its manifest after each commit."""
    manifests, log = [], RunLog(folder, kind=kind)
    for number in range(commits):
        append_prompts(log, number * PROMPTS)
        state = json.dumps({"commit": number}).encode()
        log.commit(Commit(lambda state=state: {"state.json": state}), wait=True)
        manifests.append(read_manifest(folder))
    log.close()
    return manifests


def offsets(folder: Path, view: str = "prompts") -> list[int]:
    with LogReader([folder]) as log:
        return log.select(f'SELECT "offset" FROM {view} ORDER BY "offset", seq')["offset"].to_pylist()


def content_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_each_commit_keeps_its_predecessor_with_its_checkpoint(tmp_path: Path):
    manifests = write_commits(tmp_path)
    previous = read_manifest(tmp_path, PREVIOUS)
    assert previous == manifests[-2]
    assert read_checkpoint(tmp_path, previous.checkpoint) == {"state.json": b'{"commit": 1}'}
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["000002", "000003"]


@pytest.mark.parametrize("links", [True, False])
def test_the_predecessor_is_kept_also_on_disks_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
):
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    manifests = write_commits(tmp_path)
    assert read_manifest(tmp_path, PREVIOUS) == manifests[-2]
    assert list((tmp_path / "log").glob(".*.tmp")) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_predecessor_replaces_a_lost_manifest(tmp_path: Path, damage: str):
    manifests = write_commits(tmp_path)
    DAMAGES[damage](tmp_path / MANIFEST)
    broken = (tmp_path / MANIFEST).read_bytes() if (tmp_path / MANIFEST).exists() else None
    (repaired,) = repair_run(tmp_path)
    assert (repaired.kind, repaired.manifest) == (RepairKind.STEPPED_BACK, manifests[-2])
    assert "its predecessor" in repaired.doubts[0]
    assert "3 newer parts are not in it" in repaired.doubts[1]
    assert read_manifest(tmp_path) == manifests[-2]
    assert offsets(tmp_path) == list(range(2 * PROMPTS))
    kept = tmp_path / UNREADABLE
    assert (kept.read_bytes() if kept.exists() else None) == broken
    with RunLog(tmp_path) as log:  # continues like a run that resumes from the checkpoint
        append_prompts(log, 2 * PROMPTS, 4)
    assert offsets(tmp_path) == list(range(2 * PROMPTS + 4))


def test_rows_of_the_last_commit_can_be_kept_for_reading(tmp_path: Path):
    write_commits(tmp_path)
    (tmp_path / MANIFEST).unlink()
    (repaired,) = repair_run(tmp_path, all_rows=True)
    assert repaired.kind is RepairKind.REBUILT
    assert (repaired.manifest.finished, repaired.manifest.checkpoint) == (True, None)
    assert offsets(tmp_path) == offsets(tmp_path, "decisions") == list(range(3 * PROMPTS))
    assert "decisions: 1 parts with 3 rows have no recorded digest; they can be read" in repaired.doubts
    assert any("cannot be resumed" in doubt for doubt in repaired.doubts)
    with pytest.raises(RunError, match="must not hold a log yet"):
        RunLog(tmp_path)


def test_a_predecessor_with_damaged_files_is_not_used(tmp_path: Path):
    manifests = write_commits(tmp_path)
    (tmp_path / MANIFEST).unlink()
    (tmp_path / manifests[-2].checkpoint.folder / "state.json").write_bytes(b"{}")
    (repaired,) = repair_run(tmp_path)
    assert repaired.kind is RepairKind.REBUILT
    assert repaired.manifest.identity == manifests[-1].identity
    assert offsets(tmp_path) == list(range(3 * PROMPTS))


def test_a_log_is_rebuilt_without_any_manifest(tmp_path: Path):
    manifests = write_commits(tmp_path)
    before = manifests[-1].tables
    for name in (MANIFEST, PREVIOUS):
        (tmp_path / name).unlink()
    (repaired,) = repair_run(tmp_path)
    assert repaired.manifest.tables == before, "every part states what the manifest had"
    assert repaired.manifest.identity not in ("", manifests[-1].identity)
    assert any("identity is lost" in doubt for doubt in repaired.doubts)
    assert any(
        doubt == "decisions: 3 parts with 9 rows have no recorded digest; they can be read" for doubt in repaired.doubts
    )
    with LogReader([tmp_path]) as log:
        assert log.check().mismatches.num_rows == 0


def test_a_finished_log_with_every_table_is_rebuilt(tmp_path: Path):
    run = write_run(tmp_path / "run", small_run_events())
    before = read_manifest(run)
    (run / MANIFEST).unlink()
    (repaired,) = repair_run(run)
    assert repaired.manifest.tables == before.tables
    assert repaired.manifest.finished


def test_a_log_of_one_commit_is_not_reset_to_its_beginning(tmp_path: Path):
    (manifest,) = write_commits(tmp_path, commits=1)
    assert read_manifest(tmp_path, PREVIOUS).checkpoint is None
    (tmp_path / MANIFEST).unlink()
    (repaired,) = repair_run(tmp_path)
    assert (repaired.kind, repaired.manifest.tables) == (RepairKind.REBUILT, manifest.tables)


def test_damaged_parts_are_left_out_and_the_missing_rows_named(tmp_path: Path):
    manifests = write_commits(tmp_path, commits=4)
    parts = manifests[-1].tables
    for number, table in ((1, "decisions"), (2, "blocks")):
        path = part_path(tmp_path, parts[table][number])
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    part_path(tmp_path, parts["prompts"][2]).unlink()
    (tmp_path / MANIFEST).unlink()
    (repaired,) = repair_run(tmp_path)
    assert repaired.kind is RepairKind.REBUILT
    left = [doubt for doubt in repaired.doubts if doubt.startswith("left out: ")]
    assert [
        str(part_path(tmp_path, parts[table][number])) in doubt
        for (number, table), doubt in zip(((1, "decisions"), (2, "blocks")), left, strict=True)
    ] == [True, True]
    for table, rows in (("decisions", "3 to 5"), ("blocks", "6 to 8"), ("prompts", "6 to 8")):
        assert f"{table}: rows {rows} are missing" in repaired.doubts
    assert offsets(tmp_path, "decisions") == [0, 1, 2, 6, 7, 8, 9, 10, 11]


def test_rows_that_are_missing_at_the_end_are_named(tmp_path: Path):
    manifests = write_commits(tmp_path)
    part_path(tmp_path, manifests[-1].tables["prompts"][2]).unlink()
    part_path(tmp_path, manifests[-1].tables["prompts"][1]).unlink()
    (tmp_path / MANIFEST).unlink()
    (repaired,) = repair_run(tmp_path)
    assert "prompts: rows 3 to 5 are missing" in repaired.doubts, "as the predecessor shows"


@pytest.mark.slow
@pytest.mark.parametrize("previous", [True, False])
@pytest.mark.parametrize("sources", ["there", "gone", "in part"])
def test_joined_parts_and_their_sources_give_each_row_once(tmp_path: Path, previous: bool, sources: str):
    manifests = write_commits(tmp_path, commits=4)
    compact(tmp_path, rows=20, counted=1)
    joined = read_manifest(tmp_path)
    assert [part.file for part in joined.tables["decisions"]] == ["decisions/part-000001-000004.parquet"]
    gone = {"there": slice(0, 0), "gone": slice(0, 4), "in part": slice(1, 3)}[sources]
    for table in ("decisions", "blocks", "prompts"):
        for part in manifests[-1].tables[table][gone]:
            part_path(tmp_path, part).unlink()
    (tmp_path / MANIFEST).unlink()
    if not previous:
        (tmp_path / PREVIOUS).unlink()
    (repaired,) = repair_run(tmp_path)
    assert repaired.kind is (RepairKind.STEPPED_BACK if previous and sources == "there" else RepairKind.REBUILT)
    assert offsets(tmp_path, "decisions") == list(range(4 * PROMPTS))
    with LogReader([tmp_path]) as log:
        found = log.check()
    assert (found.decisions, found.mismatches.num_rows, found.miscounts.num_rows) == (12, 0, 0)


def test_files_that_belong_elsewhere_are_left_out(tmp_path: Path):
    manifests = write_commits(tmp_path)
    decisions = tmp_path / "log" / "decisions"
    shutil.copy(part_path(tmp_path, manifests[-1].tables["blocks"][0]), decisions / "part-000004.parquet")
    (decisions / "part-000005.parquet").symlink_to(part_path(tmp_path, manifests[-1].tables["decisions"][0]))
    (decisions / "part-notes.parquet").write_text("mine")
    for name in (MANIFEST, PREVIOUS):
        (tmp_path / name).unlink()
    (repaired,) = repair_run(tmp_path)
    assert [part.file for part in repaired.manifest.tables["decisions"]] == [
        part.file for part in manifests[-1].tables["decisions"]
    ]
    assert len([doubt for doubt in repaired.doubts if doubt.startswith("left out: ")]) == 2


def test_only_the_log_that_is_broken_is_repaired(tmp_path: Path):
    write_commits(tmp_path, kind=RunKind.SERVE)
    learner = open_partition(tmp_path, LEARNER)
    manifests = write_commits(learner, kind=RunKind.LEARNER)
    for name in (MANIFEST, PREVIOUS):
        (learner / name).unlink()
    before = (tmp_path / MANIFEST).read_bytes()
    own, repaired = repair_run(tmp_path)
    assert (own.kind, own.doubts) == (RepairKind.SOUND, ())
    assert (tmp_path / MANIFEST).read_bytes() == before
    assert (repaired.folder, repaired.kind) == (learner, RepairKind.REBUILT)
    assert (repaired.manifest.kind, repaired.manifest.tables) == (RunKind.LEARNER, manifests[-1].tables)


def test_nothing_but_the_manifest_is_changed(tmp_path: Path):
    write_commits(tmp_path)
    sound = content_of(tmp_path)
    assert [one.kind for one in repair_run(tmp_path)] == [RepairKind.SOUND]
    assert content_of(tmp_path) == sound
    (tmp_path / MANIFEST).unlink()
    repair_run(tmp_path)
    assert {name: content for name, content in content_of(tmp_path).items() if name != str(MANIFEST)} == {
        name: content for name, content in sound.items() if name != str(MANIFEST)
    }


def change_manifest(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / MANIFEST).read_bytes()) | changes
    (folder / MANIFEST).write_text(json.dumps(content))


def test_a_log_that_cannot_be_repaired_is_refused_and_left_unchanged(tmp_path: Path):
    with pytest.raises(RunError, match="has no log"):
        repair_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    newer = tmp_path / "newer"
    write_commits(newer)
    change_manifest(newer, schema_version=99)
    before = content_of(newer)
    with pytest.raises(RunError, match="use the release that wrote it"):
        repair_run(newer)
    with RunLock(newer), pytest.raises(RunError, match="two processes"):
        repair_run(newer)
    assert content_of(newer) == before
    (tmp_path / "empty" / "log" / "decisions").mkdir(parents=True)
    with pytest.raises(CorruptError, match="must hold a part that can be read"):
        repair_run(tmp_path / "empty")
