"""A run on an object store: a process works in a local folder, and every commit is copied there in the commit's order.

An object store replaces one object at a time, whole, and can do no more. So what a commit needs is put there first,
under names that nobody else writes (the sha256 of the content), and the manifest last: its replacement is the commit.
What is told of a commit, to MLflow too, is told after that. The local folder is no more than a copy: whoever goes on
begins with what the manifest on the store names, and drops the rest.
"""

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import pyarrow.parquet as pq

from store import faults
from store.errors import CorruptError, OmnidraftError, RunError
from store.files import digest_of
from store.manifest import MANIFEST, Manifest, part_path
from store.object_store import CHUNK
from store.object_store_index import Files, Index, Owner
from store.object_store_run import OBJECTS, QUEUE, VERSIONS, RemoteRun, each
from store.object_store_uri import below, cache_folder, uri_of
from store.partitions import PARTITIONS, partition_folder
from store.version_folder import MANIFEST as VERSION_MANIFEST
from store.version_folder import read_manifest as read_version

GROWING = (QUEUE, "rejected.jsonl")  # only ever appended to between the commits of one process
MOST_PIECES = 64  # of a file that grows; then it is put as one again


class Mirror(Protocol):
    """What follows the commits of one log. Called by one thread at a time: `pull`, then `claim`, then `push`."""

    name: str  # of the run, as a command line has it

    def manifest(self) -> Manifest | None:
        """What the other place has committed; None if nothing, or where there is none."""

    def pull(self) -> None:
        """Before the local folder is looked at: make it what the other place has committed."""

    def claim(self, manifest: Manifest) -> None:
        """Before the first commit of a process, with what the log holds."""

    def push(self, manifest: Manifest) -> None:
        """What was just committed locally counts when this returns."""

    def partitions(self) -> list[str]:
        """Names of the run's partitions in the other place; none where there is none."""

    def partition(self, name: str) -> "Mirror":
        """What follows the commits of a partition of the run."""


class NoMirror:
    """The local folder is all there is."""

    def __init__(self, local: Path) -> None:
        self._local, self.name = local, str(local)

    def manifest(self) -> Manifest | None:
        """There is no other place."""
        return None

    def pull(self) -> None:
        """Nothing."""

    def claim(self, manifest: Manifest) -> None:
        """Nothing."""

    def push(self, manifest: Manifest) -> None:
        """Nothing."""

    def partitions(self) -> list[str]:
        """There is no other place."""
        return []

    def partition(self, name: str) -> Mirror:
        """As this one."""
        return NoMirror(partition_folder(self._local, name))


class ObjectMirror:
    """Copies the commits of one log to an object store.

    Args:
        local: the folder of the log: a run's, or a partition's.
        uri: where it is kept.
        run_folder: the one that the folders of versions are relative to, if that is not `local`.

    Raises:
        OmnidraftError: from every method, the store did not answer. What was committed there before stands.
    """

    def __init__(self, local: Path, uri: str, run_folder: Path | None = None) -> None:
        self._local, self.name, self._run_folder = local, uri, run_folder or local
        self._remote = RemoteRun(local, uri, run_folder)
        self._versions: dict[str, tuple[str, ...]] = {}
        self._read: set[str] = set()  # parts of the table of versions
        self._grown: dict[str, list[tuple[str, int]]] = {}  # sha256 and bytes of the pieces that this process put
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._owner = Owner(socket.gethostname(), os.getpid(), now, uuid4().hex)
        self._swept = False

    def manifest(self) -> Manifest | None:
        """See Mirror. Raises CorruptError for what is no manifest."""
        self._remote.look()
        return self._remote.index.manifest if self._remote.index else None

    def pull(self) -> None:
        """See Mirror. What is local and not committed on the store is removed.

        Raises:
            CorruptError: an object is missing, or not what was committed; its file is named.
        """
        self._remote.pull()
        files = self._remote.index.files if self._remote.index else {}
        self._versions = {path: one for path, one in files.items() if path.startswith(VERSIONS)}

    def claim(self, manifest: Manifest) -> None:
        """Tell all others that this process writes now: one that wrote before is refused at its next commit.

        Raises:
            RunError: another process wrote since `pull`; it is named.
        """
        before = self._remote.index.files if self._remote.index else {}
        self._commit(Index(manifest, self._owner, {**before, **self._top()}))

    def push(self, manifest: Manifest) -> None:
        """See Mirror. What the commit before needed and this one does not is removed from the store.

        Raises:
            RunError: another process wrote since this one did last; it is named.
            CorruptError: a local file is not what was committed.
        """
        before = self._remote.there
        self._note_versions(manifest)
        self._commit(Index(manifest, self._owner, {**self._top(), **self._versions, **self._grow()}))
        gone = before - self._remote.there
        with suppress(OmnidraftError):  # the commit stands; a later process sweeps
            if not self._swept:  # what killed processes left, once it is certain that no other one writes
                gone = frozenset(self._remote.store.names(OBJECTS)) - self._remote.there
                self._swept = True
            each(lambda digest: self._remote.store.remove(f"{OBJECTS}/{digest}"), gone)

    def partitions(self) -> list[str]:
        """See Mirror."""
        return sorted(self._remote.store.names(PARTITIONS))

    def partition(self, name: str) -> Mirror:
        """See Mirror."""
        return ObjectMirror(partition_folder(self._local, name), below(self.name, PARTITIONS, name), self._local)

    def _commit(self, index: Index) -> None:
        """Put what is not there yet, then the manifest."""
        beside = {path for path in index.files if not path.startswith(VERSIONS)}  # are put already
        found = {one[0]: path for path, one in index.everything().items() if path not in beside}
        each(self._put_file, [(digest, path) for digest, path in found.items() if digest not in self._remote.there])
        faults.reach("mirror: before the manifest")
        self._require_mine()
        content = index.to_json()
        self._remote.store.write(MANIFEST.as_posix(), [content])
        self._remote.know(index, content)
        faults.reach("mirror: after the manifest")

    def _require_mine(self) -> None:
        """Pyarrow cannot put an object on a condition: what comes between this and the next request is overwritten."""
        content = self._remote.store.read(MANIFEST.as_posix())
        if (None if content is None else hashlib.sha256(content).hexdigest()) != self._remote.seen:
            owner = Index.parse(self.name, content).owner if content else "somebody who removed its manifest"
            raise RunError(
                f"{self.name} must not be written by two processes, but {owner} wrote it since this one did; what this "
                "one did since its last commit is dropped. Let the other go on, or name another place with --run"
            )

    def _put_file(self, named: tuple[str, str]) -> None:
        digest, path = named
        self._remote.store.write(f"{OBJECTS}/{digest}", _chunks(self._remote.place(path), digest))
        faults.reach("mirror: between two objects")

    def _put_bytes(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._remote.there:
            self._remote.store.write(f"{OBJECTS}/{digest}", [content])
        return digest

    def _top(self) -> Files:
        """The settings, the summary and other small files directly in the folder; they are put at once."""
        paths = [path for path in self._local.iterdir() if path.is_file() and not path.name.startswith(".")]
        return {path.name: (self._put_bytes(path.read_bytes()),) for path in paths if path.name not in GROWING}

    def _grow(self) -> Files:
        """The files that grow; only what is new of them is put, and at once."""
        return {name: self._put_growth(name) for name in GROWING if (self._local / name).exists()}

    def _put_growth(self, name: str) -> tuple[str, ...]:
        pieces = self._grown.get(name, [])
        pieces = [] if len(pieces) >= MOST_PIECES else pieces
        with (self._local / name).open("rb") as file:
            file.seek(sum(size for _, size in pieces))
            content = file.read()
        self._grown[name] = [*pieces, (self._put_bytes(content), len(content))] if content else pieces
        return tuple(digest for digest, _ in self._grown[name])

    def _note_versions(self, manifest: Manifest) -> None:
        """The folders of those versions that the log names; they are sealed and never changed."""
        for part in manifest.tables["versions"]:
            if part.file not in self._read:
                rows = pq.read_table(part_path(self._local, part), columns=["folder"], partitioning=None)
                for folder in rows["folder"].to_pylist():
                    self._note_version(folder)
                self._read.add(part.file)

    def _note_version(self, folder: str) -> None:
        sealed = self._run_folder / folder
        for name, digest in read_version(sealed)["files"].items():
            self._versions[f"{folder}/{name}"] = (digest,)
        self._versions[f"{folder}/{VERSION_MANIFEST}"] = (str(digest_of(sealed / VERSION_MANIFEST)),)


def place_of(run: Path) -> tuple[Path, Mirror]:
    """Where a process works on a run that a command line names, and what its commits are copied to."""
    uri = uri_of(run)
    local = cache_folder("runs", uri) if uri else run
    return local, mirror_of(local, uri)


def mirror_of(local: Path, uri: str | None) -> Mirror:
    """What the commits in a run's local folder are copied to; None for nowhere."""
    return ObjectMirror(local, uri) if uri else NoMirror(local)


def _chunks(path: Path, digest: str) -> Iterator[bytes]:
    """The content of a file that must have this digest; behind its last piece `CorruptError` if it has another."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
            yield chunk
    if found.hexdigest() != digest:
        raise CorruptError(f"{path} must have the digest {digest[:12]}... that was committed, but was changed since")
