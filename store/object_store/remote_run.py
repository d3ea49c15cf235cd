"""Fetch a run from an object store into a local folder, to resume it or to read its log."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from store.errors import CorruptError, OmnidraftError, RunError
from store.files import digest_of, write_chunks, write_whole
from store.log.lock import LOCK, OWNER
from store.log.manifest import MANIFEST
from store.log.partitions import PARTITIONS, partition_folder
from store.object_store.client import ObjectStore
from store.object_store.index import Files, Index
from store.object_store.uri import append_path, cache_folder, uri_of

OBJECTS, VERSIONS = "objects", "versions/"
AT_ONCE = 8  # requests in parallel
_PURSUITS = 5  # attempts if the manifest is replaced while its files are fetched
_NOT_OF_IT = (LOCK, OWNER, PARTITIONS)  # in the folder of a log, but not part of it
_T = TypeVar("_T")


class RemoteRun:
    """One log and its other files, on an object store and in a local folder.

    Args:
        local: the folder of the log, of a run or of a partition.
        uri: place of the log on the object store.
        run_folder: folder to which the folders of versions are relative, if that is not `local`.

    Attributes:
        there: SHA-256 of the objects that the index names.
        seen: SHA-256 of the manifest itself.

    Raises:
        OmnidraftError: from every method, if the store did not answer.
    """

    def __init__(self, local: Path, uri: str, run_folder: Path | None = None) -> None:
        self._local, self.uri, self._run_folder = local, uri, run_folder or local
        self.store = ObjectStore(uri)  # client of the objects
        self.index: Index | None = None  # the index on the store as this process knows it; None if there is none
        self.digests: frozenset[str] = frozenset()
        self.manifest_digest: str | None = None

    def refresh(self) -> bytes | None:
        """Read the manifest on the store; None if there is none. Raises CorruptError if it is not valid."""
        content = self.store.read(MANIFEST.as_posix())
        self.record_index(None if content is None else Index.parse(f"{self.uri}/{MANIFEST}", content), content)
        return content

    def record_index(self, index: Index | None, content: bytes | None) -> None:
        """Record the index and the manifest's content that the store has now."""
        self.index, self.digests = index, index.digests() if index else frozenset()
        self.manifest_digest = None if content is None else hashlib.sha256(content).hexdigest()

    def local_path(self, path: str) -> Path:
        """Return the local path of a file of the run."""
        return (self._run_folder if path.startswith(VERSIONS) else self._local) / path

    def pull(self) -> None:
        """Make the local folder equal to what the store's manifest names; digests of local files are checked.

        No other process may use the folder during the call. Partitions in it do not change.

        Raises:
            CorruptError: an object is missing or differs from what was committed; the message names its file.
        """
        self._take_consistently(self._pull)

    def fetch(self) -> None:
        """Fetch the log that the store's manifest names into the local folder, for reading only.

        Checkpoint and versions are not fetched. Files that were fetched before are not checked again.

        Raises:
            CorruptError: an object is missing or differs from what was committed; the message names its file.
            RunError: the store has no manifest.
        """
        self._take_consistently(self._fetch)

    def _take_consistently(self, take: Callable[[Index | None], None]) -> None:
        """Take the files of the manifest, then the manifest; retry if another process commits in between."""
        for attempt in range(1, _PURSUITS + 1):
            content = self.refresh()
            try:
                take(self.index)
            except CorruptError:
                if attempt == _PURSUITS or self.store.read(MANIFEST.as_posix()) == content:
                    raise
                continue
            if content is not None:
                (self._local / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._local / MANIFEST, content)
            return

    def _pull(self, index: Index | None) -> None:
        files = index.all_files() if index else {}
        self._remove_others(files)
        wrong = [(path, one) for path, one in files.items() if one != (digest_of(self.local_path(path)),)]
        for_each(self._fetch_file, wrong)

    def _fetch(self, index: Index | None) -> None:
        if index is None:
            raise RunError(f"{self.uri} must be a run, but has no {MANIFEST}; see --run")
        before = self._local_files()
        files = {path: one for path, one in index.files.items() if not path.startswith(VERSIONS)}
        wanted = {**index.parts(), **files}.items()
        for_each(self._fetch_file, [(path, one) for path, one in wanted if before.get(path) != one])

    def _local_files(self) -> Files:
        try:
            files = Index.parse(str(self._local), (self._local / MANIFEST).read_bytes()).all_files()
        except (OSError, OmnidraftError):
            return {}
        return {path: one for path, one in files.items() if self.local_path(path).exists()}

    def _remove_others(self, files: Files) -> None:
        kept = {self.local_path(path) for path in files}
        for found in list(self._local.rglob("*")):
            foreign = found.relative_to(self._local).parts[0] in _NOT_OF_IT
            if not foreign and found not in kept and not found.is_dir():
                found.unlink()

    def _fetch_file(self, named: tuple[str, tuple[str, ...]]) -> None:
        path, digests = named
        place = self.local_path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_chunks(place, (chunk for digest in digests for chunk in self._read_checked(path, digest)))

    def _read_checked(self, path: str, digest: str) -> Iterator[bytes]:
        """Yield the content of an object in chunks; raise `CorruptError` after the last one if the digest differs."""
        found, name = hashlib.sha256(), f"{OBJECTS}/{digest}"
        try:
            for chunk in self.store.chunks(name):
                found.update(chunk)
                yield chunk
        except FileNotFoundError:
            raise CorruptError(f"{path} of {self.uri} must be in {name}, which is not there; restore it") from None
        if found.hexdigest() != digest:
            raise CorruptError(f"{path} of {self.uri} must be in {name}, but that was changed or cut short; restore it")


def for_each(do: Callable[[_T], None], over: Iterable[_T]) -> None:
    """Call `do` for several items in parallel; after all are done, raise the first error."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(do, over))


def fetch_logs(uri: str) -> Path:
    """Fetch the committed logs of a run and its partitions; return the local folder, for reading only.

    Only files that are new since the last call are fetched. Raises what `RemoteRun.fetch` raises.
    """
    local, partitions = cache_folder("read", uri), ObjectStore(uri).names(PARTITIONS)
    local.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(local.parent / LOCK):
        for other in (path for path in (local / PARTITIONS).glob("*") if path.name not in partitions):
            shutil.rmtree(other)  # of another run that had the same name
        for name in sorted(partitions, reverse=True):  # workers before the learner, and the run itself last
            one = RemoteRun(partition_folder(local, name), append_path(uri, PARTITIONS, name))
            if one.refresh() is not None:
                one.fetch()
        RemoteRun(local, uri).fetch()
    return local


def local_copy(run: Path) -> Path:
    """Return the folder to read a run from: the run's own, or the one that it is fetched into."""
    uri = uri_of(run)
    return fetch_logs(uri) if uri else run
