"""Truncated, changed and lost files are found by their digests and named; the rest can still be read."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_runs import Ended, Life, World, differences, resume_run

from store.log.manifest import MANIFEST, PREVIOUS, part_path, read_manifest, read_manifest_file

Damage = Callable[[Path], None]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose(path: Path) -> None:
    path.unlink()


DAMAGES = pytest.mark.parametrize("damage", [truncate, flip_a_bit, lose])


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    """A copy of the killed run, for a test to damage."""
    return shutil.copytree(half, tmp_path / "run")


def type_command(run: Path, *words: object) -> Ended:
    return Life(World(run.parent / "world"), words).end()


@pytest.mark.slow
def test_a_copy_of_a_run_can_be_resumed(run: Path):
    resume_run(run, run.parent / "world")
    assert read_manifest(run).finished


@pytest.mark.slow
@DAMAGES
@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "weights.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_log_is_readable(run: Path, damage: Damage, name: str):
    checkpoint = read_manifest(run).checkpoint
    assert checkpoint
    path = run / checkpoint.folder / name
    damage(path)
    before = sorted(run.rglob("*"))
    type_command(run, "replay", "--resume", run).assert_clear(1, str(path))
    assert [path for path in sorted(run.rglob("*")) if path.name not in (".lock", ".owner.json")] == [
        path for path in before if path.name not in (".lock", ".owner.json")
    ]
    type_command(run, "check", "--run", run).assert_clear(0)


def part_of(run: Path, table: str, number: int = 1) -> Path:
    return part_path(run, read_manifest(run).tables[table][number])


@pytest.mark.slow
@DAMAGES
def test_a_damaged_part_is_named_by_check(run: Path, damage: Damage):
    path = part_of(run, "decisions")
    damage(path)
    checked = type_command(run, "check", "--run", run)
    assert checked.status == 1
    assert "Traceback" not in checked.err
    assert str(path) in checked.err
    assert str(part_of(run, "decisions", 0)) not in checked.err


@pytest.mark.slow
@DAMAGES
def test_a_run_with_a_damaged_part_of_prompts_cannot_be_resumed(run: Path, damage: Damage):
    path = part_of(run, "prompts")
    damage(path)
    type_command(run, "replay", "--resume", run).assert_clear(1, str(path))


@pytest.mark.slow
@DAMAGES
def test_undamaged_parts_can_still_be_read(run: Path, damage: Damage):
    path = part_of(run, "prompts")
    rows = read_manifest(run).tables["prompts"][1].rows
    count = ["sql", "--run", run, "--format", "csv", "SELECT count(*) FROM prompts"]
    number = int(type_command(run, *count).out.split()[-1])
    damage(path)
    queried = type_command(run, *count, "--skip-damaged")
    queried.assert_clear(0)
    assert str(path) in queried.err
    assert int(queried.out.split()[-1]) == number - rows


def test_a_damaged_manifest_is_named_and_the_one_before_stands_in(run: Path):
    truncate(run / MANIFEST)
    checked = type_command(run, "check", "--run", run)
    assert (checked.status, str(run / MANIFEST) in checked.err) == (1, True)
    assert "1 changed file" in checked.out
    truncate(run / PREVIOUS)
    for words in (["replay", "--resume", run], ["check", "--run", run]):
        type_command(run, *words).assert_clear(1, str(run / MANIFEST))


@pytest.mark.slow
@pytest.mark.representatives("lose")
@pytest.mark.parametrize("damage", [truncate, lose])
def test_a_run_resumed_from_the_previous_manifest_ends_like_an_undamaged_one(run: Path, whole: Path, damage: Damage):
    damage(run / MANIFEST)
    assert read_manifest(run) == read_manifest_file(run / PREVIOUS)
    assert differences(resume_run(run, run.parent / "world"), whole) == []


def test_damaged_settings_are_named(run: Path):
    truncate(run / "config.json")
    type_command(run, "replay", "--resume", run).assert_clear(2, str(run / "config.json"))
