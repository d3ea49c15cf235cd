"""A full disk gives a clear error and keeps the last commit; the run can be resumed when there is space again."""

import shutil
from pathlib import Path

import pytest
from faulty_runs import (
    Life,
    Stream,
    World,
    checkpoints,
    differences,
    resume_run,
    strays,
)


def assert_readable(run: Path, world: World) -> None:
    checked = Life(world, ["check", "--run", run]).end()
    checked.assert_clear(0)
    assert "0 mismatches" in checked.out


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("largest", [60_000, 8_000, 300])
def test_a_file_that_cannot_grow_ends_the_run_with_its_last_commit(
    stream: Stream, half: Path, whole: Path, tmp_path: Path, largest: int
):
    """The limits are too small for a checkpoint's tensors, for a version and the manifest, and for almost any file."""
    run, world = shutil.copytree(half, tmp_path / "run"), World(tmp_path / "world")
    small = World(tmp_path / "world", largest_file=largest)
    ended = Life(small, ["replay", "--resume", run]).end()
    ended.assert_clear(1, f"omnidraft replay --resume {run}")
    assert checkpoints(run) >= checkpoints(half)
    assert_readable(run, world)
    resume_run(run, world.folder)
    assert differences(run, whole) == []
    assert strays(run) == set()


@pytest.mark.slow
@pytest.mark.parametrize("largest", [100_000, 20_000, 2_000, 100])
def test_a_new_run_without_disk_space_fails_with_a_clear_error(
    stream: Stream, whole: Path, tmp_path: Path, largest: int
):
    run = tmp_path / "run"
    ended = Life(World(tmp_path / "world", largest_file=largest), stream.begin(run)).end()
    assert ended.status in (1, 2)
    ended.assert_clear(ended.status, str(run))
