"""Disk cache of data derived from tokenizers, and of measurements of this machine.

The folder is `$OMNIDRAFT_CACHE`, else `$XDG_CACHE_HOME/omnidraft`, else `~/.cache/omnidraft`. A file is written
atomically; its name is a digest of its inputs. A file that cannot be read, or whose seal does not match its name, is
made again. Without a writable folder nothing is cached. Nothing is unpickled.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

FORMAT = 1  # goes up when what is stored, or how it is made, changes
Arrays = Mapping[str, npt.NDArray[Any]]
T = TypeVar("T")


def cache_folder() -> Path | None:
    """Return the cache folder; None on a machine without a home folder."""
    if os.environ.get("OMNIDRAFT_CACHE"):
        return Path(os.environ["OMNIDRAFT_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "omnidraft"
    try:
        return Path.home() / ".cache" / "omnidraft"
    except RuntimeError:
        return None


def digest_json(*parts: object) -> str:
    """Return the sha256 of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_arrays(kind: str, key: str, restore: Callable[[Arrays], T], *, shipped: Path | None = None) -> T | None:
    """Load the arrays of a key and return `restore` of them; None if there are none, or they are damaged. `shipped` is
    another folder with such files, which is searched after the cache.
    """
    for folder in (cache_folder(), shipped):
        if folder is None:
            continue
        with suppress(Exception):  # damage raises many kinds of errors; the file is then made again
            with np.load(folder / _name_of(kind, key, "npz"), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if str(arrays["key"]) == _seal(kind, key):
                return restore(arrays)
    return None


def store_arrays(kind: str, key: str, arrays: Arrays) -> None:
    """Store arrays under a key, compressed."""
    if path := cache_path(kind, key, "npz"):
        write_atomically(path, lambda file: np.savez_compressed(file, key=np.array(_seal(kind, key)), **arrays))  # type: ignore[arg-type]


def write_atomically(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically. Does nothing if the folder cannot be written."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as file:
                fill(file)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def cache_path(kind: str, key: str, suffix: str) -> Path | None:
    """Return the path of a key's file; None without a cache folder."""
    root = cache_folder()
    return None if root is None else root / _name_of(kind, key, suffix)


def _name_of(kind: str, key: str, suffix: str) -> str:
    return f"{kind}-{key[:32]}.{suffix}"


def _seal(kind: str, key: str) -> str:
    return f"omnidraft {kind} {FORMAT} {key}"
