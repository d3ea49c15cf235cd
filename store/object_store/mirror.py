"""A run on an object store: a process works in a local folder, and every commit is copied to the store.

An object store replaces one object at a time, atomically, and nothing more. Therefore the new objects of a commit are
uploaded first, under names that no other content has (their SHA-256), and the manifest last: its replacement is the
commit. MLflow is sent only what was committed so. The local folder is only a copy: a process that resumes the run
starts from what the manifest on the store names, and removes the rest.
"""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from store.errors import CorruptError, OmnidraftError, RunError
from store.fault_points import fault_point
from store.files import digest_of
from store.log.manifest import MANIFEST, Manifest
from store.log.mirror import Mirror, NoMirror
from store.log.partitions import PARTITIONS, partition_folder
from store.log.parts import read_part
from store.object_store.client import CHUNK
from store.object_store.index import Files, Index, Writer
from store.object_store.remote_run import OBJECTS, VERSIONS, RemoteRun, for_each
from store.object_store.uri import append_path, cache_folder, uri_of
from store.registry.version_folder import MANIFEST as VERSION_MANIFEST
from store.registry.version_folder import read_manifest as read_version

GROWING = ("rejected.jsonl",)  # files to which one process only appends
MOST_PIECES = 64  # objects of a growing file; beyond, it is uploaded as one


class ObjectMirror(Mirror):
    """Copies the commits of one log to an object store.

    Args:
        local: the folder of the log, of a run or of a partition.
        uri: place of the log on the object store.
        run_folder: folder to which the folders of versions are relative, if that is not `local`.

    Raises:
        OmnidraftError: from every method, if the store did not answer; earlier commits stay valid.
    """

    def __init__(self, local: Path, uri: str, run_folder: Path | None = None) -> None:
        self._local, self.name, self._run_folder = local, uri, run_folder or local
        self._remote = RemoteRun(local, uri, run_folder)
        self._versions: dict[str, tuple[str, ...]] = {}
        self._read: set[str] = set()  # parts of the table of versions that were read
        self._grown: dict[str, list[tuple[str, int]]] = {}  # SHA-256 and bytes of the pieces that this process uploaded
        self._owner = Writer.me()
        self._swept = False

    @override
    def manifest(self) -> Manifest | None:
        """Read the manifest on the store; None if there is none. Raises CorruptError if it is not valid."""
        self._remote.refresh()
        return self._remote.index.manifest if self._remote.index else None

    @override
    def pull(self) -> None:
        """Make the local folder equal to the commit on the store; other local files are removed.

        Raises:
            CorruptError: an object is missing or differs from what was committed; the message names its file.
        """
        self._remote.pull()
        files = self._remote.index.files if self._remote.index else {}
        self._versions = {path: one for path, one in files.items() if path.startswith(VERSIONS)}

    @override
    def acquire(self, manifest: Manifest) -> None:
        """Take over the run: a process that wrote before is refused at its next commit.

        Raises:
            RunError: another process, which the message names, wrote since `pull`.
        """
        before = self._remote.index.files if self._remote.index else {}
        self._commit(Index(manifest, self._owner, {**before, **self._upload_small_files()}))

    @override
    def push(self, manifest: Manifest) -> None:
        """Upload a commit, then remove objects from the store that it does not name.

        Raises:
            RunError: another process, which the message names, wrote since this one.
            CorruptError: a local file differs from what was committed.
        """
        before = self._remote.digests
        self._note_versions(manifest)
        self._commit(
            Index(manifest, self._owner, {**self._upload_small_files(), **self._versions, **self._upload_growth()})
        )
        gone = before - self._remote.digests
        with suppress(OmnidraftError):  # the commit is done; a later process removes the objects
            if not self._swept:  # remove what killed processes left, now that no other process writes
                gone = frozenset(self._remote.store.names(OBJECTS)) - self._remote.digests
                self._swept = True
            for_each(lambda digest: self._remote.store.remove(f"{OBJECTS}/{digest}"), gone)

    @override
    def partitions(self) -> list[str]:
        return sorted(self._remote.store.names(PARTITIONS))

    @override
    def partition(self, name: str) -> Mirror:
        return ObjectMirror(partition_folder(self._local, name), append_path(self.name, PARTITIONS, name), self._local)

    def _commit(self, index: Index) -> None:
        """Upload new objects, then the manifest."""
        uploaded = {path for path in index.files if not path.startswith(VERSIONS)}
        found = {one[0]: path for path, one in index.all_files().items() if path not in uploaded}
        for_each(
            self._put_file, [(digest, path) for digest, path in found.items() if digest not in self._remote.digests]
        )
        fault_point("mirror: before the manifest")
        self._require_ownership()
        content = index.to_json()
        self._remote.store.write(MANIFEST.as_posix(), [content])
        self._remote.record_index(index, content)
        fault_point("mirror: after the manifest")

    def _require_ownership(self) -> None:
        """Raise RunError if another process wrote. A write between this check and the next request is overwritten."""
        content = self._remote.store.read(MANIFEST.as_posix())
        if (None if content is None else hashlib.sha256(content).hexdigest()) != self._remote.manifest_digest:
            owner = Index.parse(self.name, content).owner if content else "somebody who removed its manifest"
            raise RunError(
                f"{self.name} must not be written by two processes, but {owner} wrote it since this one did; what this "
                "one did since its last commit is dropped. Let the other continue, or name another place with --run"
            )

    def _put_file(self, named: tuple[str, str]) -> None:
        digest, path = named
        self._remote.store.write(f"{OBJECTS}/{digest}", _chunks(self._remote.local_path(path), digest))
        fault_point("mirror: between two objects")

    def _put_bytes(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._remote.digests:
            self._remote.store.write(f"{OBJECTS}/{digest}", [content])
        return digest

    def _upload_small_files(self) -> Files:
        """Upload the settings, the summary and other small files directly in the folder."""
        paths = [path for path in self._local.iterdir() if path.is_file() and not path.name.startswith(".")]
        return {path.name: (self._put_bytes(path.read_bytes()),) for path in paths if path.name not in GROWING}

    def _upload_growth(self) -> Files:
        """Upload the new part of each growing file."""
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
        """Add the files of the versions that the log names; these are sealed and never changed."""
        for part in manifest.tables["versions"]:
            if part.file not in self._read:
                for folder in read_part(self._local, part, ["folder"])["folder"].to_pylist():
                    self._note_version(folder)
                self._read.add(part.file)

    def _note_version(self, folder: str) -> None:
        sealed = self._run_folder / folder
        for name, digest in read_version(sealed)["files"].items():
            self._versions[f"{folder}/{name}"] = (digest,)
        self._versions[f"{folder}/{VERSION_MANIFEST}"] = (str(digest_of(sealed / VERSION_MANIFEST)),)


def place_of(run: Path) -> tuple[Path, Mirror]:
    """Return the local folder of a run that a command line names, and the mirror of its commits."""
    uri = uri_of(run)
    local = cache_folder("runs", uri) if uri else run
    return local, mirror_of(local, uri)


def mirror_of(local: Path, uri: str | None) -> Mirror:
    """Return the mirror of the commits in a run's local folder; without a URI, one that copies nothing."""
    return ObjectMirror(local, uri) if uri else NoMirror(local)


def _chunks(path: Path, digest: str) -> Iterator[bytes]:
    """Yield the content of a file in chunks; raise `CorruptError` after the last one if the digest differs."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
            yield chunk
    if found.hexdigest() != digest:
        raise CorruptError(f"{path} must have the digest {digest[:12]}... that was committed, but was changed since")
