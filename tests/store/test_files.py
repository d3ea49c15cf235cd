"""Files are replaced completely or not at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from store.files import keep_copy, write_chunks, write_whole


def fail_midway() -> Iterator[bytes]:
    yield b"half"
    raise OSError("the disk is full")


def test_a_failed_write_leaves_the_previous_content(tmp_path: Path):
    path = tmp_path / "file"
    write_whole(path, b"before")
    with pytest.raises(OSError, match="full"):
        write_chunks(path, fail_midway())
    assert path.read_bytes() == b"before"
    write_chunks(path, [b"a", b"b"])
    assert path.read_bytes() == b"ab"


def test_a_copy_keeps_its_content_when_the_file_is_replaced(tmp_path: Path):
    path, copy = tmp_path / "file", tmp_path / "copy"
    for content in (b"one", b"two"):
        write_whole(path, content)
        keep_copy(path, copy)
        write_whole(path, b"later")
        assert copy.read_bytes() == content
    assert sorted(one.name for one in tmp_path.iterdir()) == ["copy", "file"]
