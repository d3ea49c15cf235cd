"""Packed matrices are kept in a file and taken from there, the same bits, until the code or the model is another."""

import os
import shutil
import time
from io import FileIO
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.engine.compiled import packed_memory
from stages.engine.compiled.packed_memory import PackedMemory
from store.errors import ModelError

SHAPES = [(3, 5, 16), (1, 7, 16), (40, 1000, 64)]
KINDS = [np.dtype(np.int32), np.dtype(np.int16), np.dtype(np.uint8)]


def take(memory: PackedMemory) -> list[Any]:
    return [memory.reserve(shape, kind) for shape, kind in zip(SHAPES, KINDS, strict=True)]


def fill(path: Path | None, seed: int = 0) -> list[Any]:
    memory, order = PackedMemory(path), np.random.default_rng(seed)
    assert not memory.filled
    arrays = take(memory)
    for array in arrays:
        array[...] = order.integers(0, 100, array.shape)
    memory.keep()
    return arrays


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "packed-abc-layers-1.bin"


@pytest.mark.parametrize("large_pages", [True, False])
def test_what_was_kept_is_there_again(path: Path, monkeypatch: pytest.MonkeyPatch, *, large_pages: bool):
    counts = cycle((0, 1 << 40 if large_pages else 0))
    monkeypatch.setattr(packed_memory, "_count_large", lambda: next(counts))
    arrays = fill(path)
    memory = PackedMemory(path)
    assert memory.filled
    found = take(memory)
    memory.keep()
    for array, kept in zip(arrays, found, strict=True):
        assert np.array_equal(array, kept)
        assert kept.ctypes.data % 64 == 0
    found[0][:] = 1  # not in the file
    assert np.array_equal(take(PackedMemory(path))[0], arrays[0])


def test_a_file_is_written_by_whole_large_pages(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Or the system keeps it in small ones, from which it is read at half of the speed."""
    written: list[int] = []

    class Recorder(FileIO):
        def write(self, data: Any) -> int:
            written.append(len(data))
            return super().write(data)

    def write_recorded(place: Path, fill: Any) -> None:
        with Recorder(place, "wb") as file:
            fill(file)

    monkeypatch.setattr(packed_memory, "write_atomically", write_recorded)
    fill(path)
    assert set(written[:-1]) == {packed_memory.LARGE_PAGE}
    assert sum(written) == path.stat().st_size


def test_without_a_path_nothing_is_kept(tmp_path: Path):
    fill(None)
    assert not list(tmp_path.iterdir())


def test_files_that_are_replaced_or_unused_are_deleted(path: Path):
    names = ("packed-abc-layers-0.bin", "packed-abc-output-0.bin", "packed-def-layers-0.bin", "packed-old-layers-0.bin")
    path.parent.mkdir()
    for name in names:
        (path.parent / name).write_bytes(b"x")
    month_ago = time.time() - 31 * 86400
    os.utime(path.parent / names[3], (month_ago, month_ago))
    fill(path)
    assert {file.name for file in path.parent.iterdir()} == {path.name, *names[1:3]}


def test_a_file_in_use_is_as_new(path: Path):
    fill(path)
    os.utime(path, (0, 0))
    PackedMemory(path)
    fill(path.with_name("packed-def-layers-1.bin"))
    assert path.exists()


def test_nothing_is_kept_without_room(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1 << 20))
    fill(path)
    assert not list(path.parent.iterdir())


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    fill(tmp_path / "file" / "packed-abc-layers-1.bin")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_file_that_was_cut_is_named(path: Path):
    fill(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"must hold all packed matrices, but ends before; delete it"):
        take(PackedMemory(path))
