"""Truncated, changed and lost files are found by their digests and named; the rest can still be read."""

import shutil
from pathlib import Path

import pytest
from faulty_runs import Ended, Life, World, differences, resume_run

from store.log.lock import LOCK, OWNER
from store.log.manifest import MANIFEST, PREVIOUS, part_path, read_manifest, read_manifest_file


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    """A copy of the killed run, for a test to damage."""
    return shutil.copytree(half, tmp_path / "run")


def type_command(run: Path, *words: object) -> Ended:
    return Life(World(run.parent / "world"), words).end()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_log_is_readable(run: Path):
    checkpoint = read_manifest(run).checkpoint
    assert checkpoint
    path = run / checkpoint.folder / "tensors.safetensors"
    truncate(path)
    before = {path for path in run.rglob("*") if path.name not in (LOCK, OWNER)}
    type_command(run, "replay", "--resume", run).assert_clear(1, str(path))
    assert {path for path in run.rglob("*") if path.name not in (LOCK, OWNER)} == before
    type_command(run, "check", "--run", run).assert_clear(0)


@pytest.mark.slow
def test_a_damaged_part_is_named_and_the_others_can_still_be_read(run: Path):
    part = read_manifest(run).tables["prompts"][1]
    path, count = part_path(run, part), ["sql", "--run", run, "--format", "csv", "SELECT count(*) FROM prompts"]
    number = int(type_command(run, *count).out.split()[-1])
    truncate(path)
    type_command(run, "replay", "--resume", run).assert_clear(1, str(path))
    checked = type_command(run, "check", "--run", run)
    assert (checked.status, str(path) in checked.err, "Traceback" in checked.err) == (1, True, False)
    queried = type_command(run, *count, "--skip-damaged")
    queried.assert_clear(0)
    assert str(path) in queried.err
    assert int(queried.out.split()[-1]) == number - part.rows


def test_a_damaged_manifest_is_named_and_the_one_before_stands_in(run: Path):
    truncate(run / MANIFEST)
    checked = type_command(run, "check", "--run", run)
    assert (checked.status, str(run / MANIFEST) in checked.err) == (1, True)
    assert "1 changed file" in checked.out
    truncate(run / PREVIOUS)
    for words in (["replay", "--resume", run], ["check", "--run", run]):
        type_command(run, *words).assert_clear(1, str(run / MANIFEST))


@pytest.mark.slow
def test_a_run_resumed_from_the_previous_manifest_ends_like_an_undamaged_one(run: Path, whole: Path):
    (run / MANIFEST).unlink()
    assert read_manifest(run) == read_manifest_file(run / PREVIOUS)
    assert differences(resume_run(run, run.parent / "world"), whole) == []


def test_damaged_settings_are_named(run: Path):
    truncate(run / "config.json")
    type_command(run, "replay", "--resume", run).assert_clear(2, str(run / "config.json"))
