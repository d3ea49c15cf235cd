"""Memory of packed matrices: in large pages, which a processor finds and prefetches faster, and kept in the cache.

Packing reads and writes as many bytes as a file has. What is packed of a file whose weights never change is written to
the cache folder, once, and mapped from then on: nothing is copied, and all processes share its pages.
"""

import math
import mmap
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from stages.engine.compiled.llvm.emitter import LINE
from stages.vocabulary.disk_cache import write_atomically
from store.errors import ModelError

LARGE_PAGE, TOGETHER = 2 << 20, 64 << 20  # bytes of a large page, and of what is reserved at once
ENOUGH_LARGE = 0.95  # of a file's bytes: from small pages memory is read at half of the speed
UNUSED_DAYS = 30  # after which a kept file is deleted
Array = np.ndarray[Any, Any]


class PackedMemory:
    """Memory of which matrices take parts, always in the same order. With a `path`, it is that of a file if there is
    one (`filled`), else `keep` writes what was taken there.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._whole: list[Array] = []  # what was reserved for new parts
        self._free: Array = np.empty(0, np.uint8)
        self.filled = False  # whether the parts hold what was packed before
        if path is not None:
            with suppress(OSError, ValueError):  # no such file, or an empty one
                self._free, self.filled = _map_file(path), True
                os.utime(path)

    def reserve(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> Array:
        """Return an array that begins a line of the cache, with nothing in it or, of a file, with what was kept."""
        size = math.prod(shape) * kind.itemsize
        reserved = -(-size // LINE) * LINE
        if reserved > len(self._free):
            if self.filled:
                raise ModelError(f"{self._path} must hold all packed matrices, but ends before; delete it")
            self._free = _map_memory(max(reserved, TOGETHER))
        own, self._free = self._free[:reserved], self._free[reserved:]
        self._whole.append(own)
        return own[:size].view(kind).reshape(shape)

    def keep(self) -> None:
        """Write what was taken to the path, if there is one and room for it, and delete the files that it replaces."""
        if self._path is not None and self._whole and not self.filled:
            with suppress(OSError):
                _delete_old(self._path)
                if shutil.disk_usage(self._path.parent).free > 2 * sum(map(len, self._whole)):
                    write_atomically(self._path, self._write)
        self._whole = []

    def _write(self, file: BinaryIO) -> None:
        page = free = np.empty(LARGE_PAGE, np.uint8)  # what is written by whole ones is in the memory in such
        for part in self._whole:
            while len(part):
                taken = min(len(part), len(free))
                free[:taken] = part[:taken]
                part, free = part[taken:], free[taken:]
                if not len(free):
                    file.write(page.data)
                    free = page
        file.write(page[: len(page) - len(free)].data)
        file.flush()
        os.fsync(file.fileno())  # what a machine leaves unwritten in a crash would be wrong weights


def _delete_old(path: Path) -> None:
    """Delete kept files of the same part of the same model, by older code, and those that nothing has used for long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    oldest = time.time() - UNUSED_DAYS * 86400
    for kept in path.parent.glob("packed-*"):
        if kept.name.rpartition("-")[0] == path.name.rpartition("-")[0] or kept.stat().st_mtime < oldest:
            kept.unlink(missing_ok=True)


def _map_memory(size: int) -> Array:
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return whole[-whole.ctypes.data % LARGE_PAGE :][:size]


def _map_file(path: Path) -> Array:
    """Map a file in large pages; where the system has none for files, read it into memory that has."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = np.frombuffer(mapped, np.uint8)
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return whole
        before = _count_large()
        mapped.madvise(mmap.MADV_HUGEPAGE)
        int(whole[:: mmap.PAGESIZE].max())  # a page that was never read has no size
        if _count_large() - before >= ENOUGH_LARGE * len(whole):
            return whole
        mapped.madvise(mmap.MADV_DONTNEED)  # its pages take no memory while they are copied
        copied = _map_memory(len(whole))

        def read(start: int) -> None:
            os.preadv(file.fileno(), [copied.data[start : start + TOGETHER]], start)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(read, range(0, len(whole), TOGETHER)))
        return copied


def _count_large() -> int:
    """Return how many bytes of mapped files are in large pages, as far as the system tells."""
    with suppress(OSError):
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("FilePmdMapped:")), 0)
    return 0
