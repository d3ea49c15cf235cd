"""Files that are written whole or not at all, and their digests."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path` such that a reader, also after a crash, finds all of it or what was there before."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Bring what was written to a file onto the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, on systems where a folder can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_bytes(content: Any) -> bytes:
    """Readable JSON of `content`; refuses NaN, which other readers of JSON cannot parse (`ValueError`)."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest_of(path: Path) -> str | None:
    """sha256 of a file in hexadecimal; None where there is none that can be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
