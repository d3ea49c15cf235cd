"""What is of a run on an object store, fetched into a local folder: to go on with it, or to read its log."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from store.errors import CorruptError, OmnidraftError, RunError
from store.files import digest_of, write_whole
from store.lock import LOCK, OWNER
from store.manifest import MANIFEST
from store.object_store import ObjectStore
from store.object_store_index import Files, Index
from store.object_store_uri import below, cache_folder, uri_of
from store.partitions import PARTITIONS, partition_folder

OBJECTS, VERSIONS, QUEUE = "objects", "versions/", "registry-queue.jsonl"
AT_ONCE = 8  # objects under way
_PURSUITS = 5  # of a manifest that is replaced while its files are fetched
_NOT_OF_IT = (LOCK, OWNER, PARTITIONS)  # in its folder
_T = TypeVar("_T")


class RemoteRun:
    """One log with what belongs to it, on an object store and in a local folder.

    Args:
        local: the folder of the log: a run's, or a partition's.
        uri: where it is kept.
        run_folder: the one that the folders of versions are relative to, if that is not `local`.

    Attributes:
        store: the objects.
        index: what lies on the store, to this process's knowledge; None if nothing does.
        there: sha256 of the objects that it names.
        seen: sha256 of the manifest itself.

    Raises:
        OmnidraftError: from every method, the store did not answer.
    """

    def __init__(self, local: Path, uri: str, run_folder: Path | None = None) -> None:
        self._local, self.uri, self._run_folder = local, uri, run_folder or local
        self.store = ObjectStore(uri)
        self.index: Index | None = None
        self.there: frozenset[str] = frozenset()
        self.seen: str | None = None

    def look(self) -> bytes | None:
        """The manifest as it lies on the store; None if there is none. Raises CorruptError for what is none."""
        content = self.store.read(MANIFEST.as_posix())
        self.know(None if content is None else Index.parse(f"{self.uri}/{MANIFEST}", content), content)
        return content

    def know(self, index: Index | None, content: bytes | None) -> None:
        """Take this for what lies on the store."""
        self.index, self.there = index, index.digests() if index else frozenset()
        self.seen = None if content is None else hashlib.sha256(content).hexdigest()

    def place(self, path: str) -> Path:
        """Where a file of the run lies locally."""
        return (self._run_folder if path.startswith(VERSIONS) else self._local) / path

    def pull(self) -> None:
        """Make the local folder what the store's manifest names, and no more; digests of what is there are checked.

        Nobody else may use the folder meanwhile. Partitions in it stay as they are.

        Raises:
            CorruptError: an object is missing, or not what was committed; its file is named.
        """
        self._following(self._pull)

    def fetch(self) -> None:
        """Bring the local folder, which is for reading only, to what the store's manifest names of the log.

        Checkpoint, queue and versions stay where they are. What was fetched before is not looked at again.

        Raises:
            CorruptError: as `pull`.
            RunError: nothing is there.
        """
        self._following(self._fetch)

    def _following(self, take: Callable[[Index | None], None]) -> None:
        """Take what the manifest names, then the manifest; again where another process commits meanwhile."""
        for attempt in range(1, _PURSUITS + 1):
            content = self.look()
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
        files = index.everything() if index else {}
        self._forget_others(files)
        wrong = [(path, one) for path, one in files.items() if one != (digest_of(self.place(path)),)]
        each(self._fetch_file, wrong)

    def _fetch(self, index: Index | None) -> None:
        if index is None:
            raise RunError(f"{self.uri} must be a run, but has no {MANIFEST}; see --run")
        before = self._fetched_before()
        files = {path: one for path, one in index.files.items() if not path.startswith((VERSIONS, QUEUE))}
        wanted = {**index.parts(), **files}.items()
        each(self._fetch_file, [(path, one) for path, one in wanted if before.get(path) != one])

    def _fetched_before(self) -> Files:
        try:
            files = Index.parse(str(self._local), (self._local / MANIFEST).read_bytes()).everything()
        except (OSError, OmnidraftError):
            return {}
        return {path: one for path, one in files.items() if self.place(path).exists()}

    def _forget_others(self, files: Files) -> None:
        kept = {self.place(path) for path in files}
        for found in list(self._local.rglob("*")):
            foreign = found.relative_to(self._local).parts[0] in _NOT_OF_IT
            if not foreign and found not in kept and not found.is_dir():
                found.unlink()

    def _fetch_file(self, named: tuple[str, tuple[str, ...]]) -> None:
        path, digests = named
        place = self.place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.tmp")
        with temporary.open("wb") as file:
            for digest in digests:
                for chunk in self._checked(path, digest):
                    file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(place)

    def _checked(self, path: str, digest: str) -> Iterator[bytes]:
        """The content of an object; behind its last piece `CorruptError` unless it is as it was put."""
        found, name = hashlib.sha256(), f"{OBJECTS}/{digest}"
        try:
            for chunk in self.store.chunks(name):
                found.update(chunk)
                yield chunk
        except FileNotFoundError:
            raise CorruptError(f"{path} of {self.uri} must be in {name}, which is not there; restore it") from None
        if found.hexdigest() != digest:
            raise CorruptError(f"{path} of {self.uri} must be in {name}, but that was changed or cut short; restore it")


def each(do: Callable[[_T], None], over: Iterable[_T]) -> None:
    """Several at a time. Raises what the first one that fails raises, when all are done."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(do, over))


def fetched(uri: str) -> Path:
    """A local folder, for reading only, with what a run and its partitions have committed on an object store.

    Only what is new since the last call is fetched. Raises what `RemoteRun.fetch` raises.
    """
    local, partitions = cache_folder("read", uri), ObjectStore(uri).names(PARTITIONS)
    local.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(local.parent / LOCK):
        for other in (path for path in (local / PARTITIONS).glob("*") if path.name not in partitions):
            shutil.rmtree(other)  # of another run that had the same name
        for name in sorted(partitions, reverse=True):  # workers before the learner, and the run itself last
            one = RemoteRun(partition_folder(local, name), below(uri, PARTITIONS, name))
            if one.look() is not None:
                one.fetch()
        RemoteRun(local, uri).fetch()
    return local


def local_copy(run: Path) -> Path:
    """The folder to read from, of a run as a command line names it: itself, or what is fetched of it."""
    uri = uri_of(run)
    return fetched(uri) if uri else run
