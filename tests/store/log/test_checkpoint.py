"""A checkpoint is read with the files that were committed, or the error names the file that differs."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from store.errors import CorruptError
from store.log.checkpoint import read_checkpoint, remove_other_checkpoints, write_checkpoint

FILES = {"state.json": b"{}", "tensors.safetensors": bytes(range(256))}


def test_a_written_checkpoint_can_be_read(tmp_path: Path):
    checkpoint = write_checkpoint(tmp_path, 3, FILES)
    assert checkpoint.folder == "checkpoint/000003"
    assert read_checkpoint(tmp_path, checkpoint) == FILES


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {"flipped": flip, "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]), "gone": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str):
    checkpoint = write_checkpoint(tmp_path, 1, FILES)
    DAMAGE[damage](tmp_path / checkpoint.folder / name)
    with pytest.raises(CorruptError, match=name):
        read_checkpoint(tmp_path, checkpoint)


WEIGHTS = {"weights.safetensors": b"heavy" * 100}


@pytest.mark.parametrize("links", [True, False])
def test_a_kept_file_is_that_of_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool):
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))
    first = write_checkpoint(tmp_path, 1, {**FILES, **WEIGHTS})
    second = write_checkpoint(tmp_path, 2, FILES, WEIGHTS, first)
    both = [(tmp_path / one.folder / "weights.safetensors").stat().st_ino for one in (first, second)]
    assert (both[0] == both[1]) == links
    remove_other_checkpoints(tmp_path, second)
    third = write_checkpoint(tmp_path, 3, FILES, WEIGHTS, second)
    for checkpoint in (second, third):
        assert read_checkpoint(tmp_path, checkpoint) == {**FILES, **WEIGHTS}


def test_only_the_committed_checkpoint_is_kept(tmp_path: Path):
    write_checkpoint(tmp_path, 1, FILES)
    second = write_checkpoint(tmp_path, 2, FILES)
    remove_other_checkpoints(tmp_path, second)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["000002"]
    remove_other_checkpoints(tmp_path, None)
    assert list((tmp_path / "checkpoint").iterdir()) == []
