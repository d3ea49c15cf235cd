"""Atomic writes of files, and digests of files."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path


def cache_root() -> Path:
    """Return the cache folder: `$OMNIDRAFT_CACHE`, else `$XDG_CACHE_HOME/omnidraft`, else `~/.cache/omnidraft`."""
    chosen, shared = os.environ.get("OMNIDRAFT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path(shared or Path.home() / ".cache") / "omnidraft").absolute()


def find_plain_path(folder: Path, special: str) -> Path:
    """Return a path of a folder that has none of these characters, for libraries that read them in a way of their own:
    the folder's own path, or else a link to it in the cache folder.
    """
    folder = folder.resolve()
    if not set(special) & set(str(folder)):
        return folder
    link = cache_root() / "links" / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    if not link.is_symlink() or link.readlink() != folder:
        link.parent.mkdir(parents=True, exist_ok=True)
        new = link.with_name(f".{link.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        new.symlink_to(folder, target_is_directory=True)
        new.replace(link)
    return link


def write_whole(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: readers find all of it or the previous content, also after a crash."""
    write_chunks(path, [content])


def write_chunks(path: Path, chunks: Iterable[bytes]) -> None:
    """Write chunks to `path` atomically, as `write_whole` does; the content may be larger than memory."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, chunks)
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_synced(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file and sync it to disk; a reader may see a part of it before that."""
    with open(path, "wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def keep_copy(path: Path, copy: Path) -> None:
    """Make `copy` the content that `path` has now, atomically, before `path` is replaced.

    Both must be in one folder. The content is not written again where the disk has hard links. The copy is on disk once
    the folder is synced, as `write_whole` does.
    """
    temporary = copy.with_name(f".{copy.name}.tmp")
    temporary.unlink(missing_ok=True)
    link_or_copy(path, temporary)
    os.replace(temporary, copy)
    temporary.unlink(missing_ok=True)  # POSIX renames nothing if both names are links to one file


def link_or_copy(path: Path, copy: Path) -> None:
    """Make a new file `copy` with the content of `path`: a hard link where the disk has them, else a synced copy.

    Neither may be changed in place afterwards.
    """
    try:
        os.link(path, copy)
    except OSError:  # a disk without hard links
        write_synced(copy, [path.read_bytes()])


def sync_file(path: Path) -> None:
    """Sync what was written to a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power failure, on systems where a folder can be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_bytes(content: object) -> bytes:
    """Encode `content` as indented JSON. Raises `ValueError` for NaN, which other readers of JSON cannot parse."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file in hexadecimal, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
