"""A disk that loses, when the power fails, what was not synced: contents of files and entries of folders.

Only `os.fsync` is observed. What it was called for is kept: of a file its content, of a folder its entries. The image
of the disk after a power failure is made of these alone. That is the worst that a file system may do which keeps its
promises: one that syncs more by itself hides a missing call. Another file system keeps all entries of folders at once,
so that a file may have its new name but not its content.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

Site = tuple[str, ...]  # what is synced, then the functions of the store that led there, the innermost first
NAMED = ("checkpoint", "log", "partitions", "run", "runs")  # folders that each count as a place of their own


@dataclass
class Disk:
    """The synced files and entries below a folder. The folder and its own entries are on the disk already.

    Attributes:
        root: the folder.
        skipped: calls from here are not made.
        sites: where calls came from.
        observe: called after each call, and after each `os.replace` and `os.rename`.
    """

    root: Path
    skipped: Site | None = None
    sites: set[Site] = field(default_factory=set)
    observe: Callable[[], None] = lambda: None
    _contents: dict[int, bytes] = field(default_factory=dict)  # by inode
    _entries: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)  # inode and whether it is a folder
    _held: dict[int, int] = field(default_factory=dict)  # open descriptors, so that no inode is given to another file

    def sync(self, descriptor: int) -> None:
        """In place of `os.fsync`."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        site = find_site(path)
        self.sites.add(site)
        if site == self.skipped:
            return
        inode = os.fstat(descriptor).st_ino
        if path.is_dir():
            self._entries[inode] = list_entries(path)
            for name in self._entries[inode]:
                self._hold(path / name)
        else:
            self._contents[inode] = path.read_bytes()
        self._hold(path)
        self.observe()

    def _hold(self, path: Path) -> None:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)

    def rename(self, rename: Callable[..., None]) -> Callable[..., None]:
        """In place of `os.replace` and `os.rename`."""

        def call(*names: object, **options: object) -> None:
            rename(*names, **options)
            self.observe()

        return call

    def fail(self, into: Path, *, all_entries: bool = False) -> Path:
        """Write what is left after a power failure; return its folder. With `all_entries`, folders have their entries
        without being synced.
        """
        self._write(list_entries(self.root), into, self.root if all_entries else None)
        return into

    def _write(self, entries: dict[str, tuple[int, bool]], into: Path, source: Path | None) -> None:
        into.mkdir(parents=True)
        for name, (inode, is_folder) in entries.items():
            if is_folder and source:
                self._write(list_entries(source / name), into / name, source / name)
            elif is_folder:
                self._write(self._entries.get(inode, {}), into / name, None)
            else:
                (into / name).write_bytes(self._contents.get(inode, b""))

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self._held.values():
            os.close(descriptor)


def list_entries(folder: Path) -> dict[str, tuple[int, bool]]:
    with os.scandir(folder) as entries:
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}


def find_site(synced: Path) -> Site:
    """Return from where the store calls `os.fsync`, and what for."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 4:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if "/store/" in name and "/tests/" not in name:
            found.append(f"{name.rpartition('/store/')[2]}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    what = "file" if synced.is_file() else synced.name if synced.name in NAMED else "folder"
    return (what, *found)


@contextmanager
def record_syncs(root: Path, skipped: Site | None = None, observe: Callable[[], None] = lambda: None) -> Iterator[Disk]:
    """Record every `os.fsync` below a new folder; with `skipped`, leave out the calls from one place. `observe` as of
    `Disk`.
    """
    if not Path("/proc/self/fd").exists():
        pytest.skip("the files of descriptors are read from /proc, which this system has not")
    (root / "runs").mkdir(parents=True)
    disk = Disk(root, skipped, observe=observe)
    renamed = {name: disk.rename(getattr(os, name)) for name in ("replace", "rename")}
    with patch.object(os, "fsync", disk.sync), patch.multiple(os, **renamed):
        yield disk
    disk.close()
