"""A run on an object store: a process works in a local folder, and every commit is copied to the store.

    RUN/objects/SHA256         all files of the run, by content; never changed
    RUN/log/manifest.json      the manifest, which names them; its replacement is the commit
    RUN/partitions/NAME/...    the same, for each partition

An object store replaces one object at a time, atomically. Therefore the new objects of a commit are uploaded first and
the manifest last, on the condition that nobody replaced it since this process did; of two writers, one fails. MLflow is
sent only what was committed so. The local folder is only a copy: a process that resumes the run starts from what the
manifest on the store names, and removes the rest.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from filelock import FileLock
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, ObjectStore, S3Store
from typing_extensions import override

from store.errors import CorruptError, OmnidraftError, RunError
from store.fault_points import fault_point
from store.files import digest_of, write_chunks, write_whole
from store.log.lock import LOCK, OWNER, Owner
from store.log.manifest import MANIFEST, Manifest, parse_manifest
from store.log.partitions import PARTITIONS, partition_folder
from store.log.parts import read_part
from store.log.run_log import Mirror
from store.object_store.uri import cache_folder, uri_of
from store.registry.version_folder import MANIFEST as VERSION_MANIFEST
from store.registry.version_folder import read_manifest as read_version

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion

OBJECTS, VERSIONS = "objects", "versions/"
REQUESTS = 8  # in parallel
CHUNK = 8 << 20  # bytes per read
ATTEMPTS = 6  # of a request; they wait about twenty seconds in total
CONNECT_SECONDS, READ_SECONDS, REQUEST_SECONDS = 5, 30, 3600
_PURSUITS = 5  # attempts if the manifest is replaced while its files are fetched
_NOT_OF_IT = (LOCK, OWNER, PARTITIONS)  # in the folder of a log, but not part of it
_SHA256 = re.compile(r"[0-9a-f]{64}")
Files = Mapping[str, str]  # SHA-256 by path in the run's folder
_T = TypeVar("_T")


@dataclass(frozen=True)
class Writer(Owner):
    """The process that wrote a manifest."""

    identity: str = field(default_factory=lambda: uuid4().hex)  # unique over all machines


@dataclass(frozen=True)
class Index:
    """A commit on an object store: its manifest, with the files that no log names under "mirror"."""

    manifest: Manifest  # the log's manifest, which names parts and the checkpoint
    owner: Writer  # the process that wrote it
    files: Files = field(default_factory=dict)  # all other files

    @classmethod
    def parse(cls, where: str, content: bytes) -> "Index":
        """Parse a manifest. Raises CorruptError for anything but that of a run on an object store, or for paths outside
        of it; RunError for an unknown version of the schema.
        """
        try:
            parsed = json.loads(content)
            mirror: dict[str, Any] = parsed["mirror"]
            for path, digest in mirror["files"].items():
                _check_file(path, digest)
            return cls(parse_manifest(Path(where), parsed), Writer(**mirror["owner"]), mirror["files"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{where} must be the manifest of a run on an object store, but: {error!r}") from error

    def to_json(self) -> bytes:
        mirror = {"owner": asdict(self.owner), "files": self.files}
        return self.manifest.to_json(mirror=mirror)

    def parts(self) -> Files:
        tables = self.manifest.tables.values()
        return {f"log/{part.file}": part.sha256 for parts in tables for part in parts}

    def all_files(self) -> Files:
        kept = self.manifest.checkpoint
        checkpoint = {f"{kept.folder}/{name}": digest for name, digest in kept.files.items()} if kept else {}
        return {**self.parts(), **checkpoint, **self.files}

    def digests(self) -> frozenset[str]:
        return frozenset(self.all_files().values())


def _check_file(path: str, digest: str) -> None:
    """Raise ValueError for a path outside of the run's folder, or in the folders of others, and for no SHA-256."""
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or "\\" in path or plain.as_posix() != path or path == ".":
        raise ValueError(f"a file must lie in the run's folder, got {path!r}")
    if plain.parts[0].startswith(".") or plain.parts[0] in ("log", "checkpoint", "partitions"):
        raise ValueError(f"a file must not lie where others belong, got {path!r}")
    if not _SHA256.fullmatch(digest):
        raise ValueError(f"an object must be named by its sha256, got {digest!r}")


class ObjectMirror(Mirror):
    """Copies the commits of one log to an object store. All methods raise OmnidraftError if the store does not answer.
    `local` is the folder of the log, of a run or of a partition, `uri` its place on the object store; folders of
    versions are relative to `run_folder`, if that is not `local`.
    """

    def __init__(self, local: Path, uri: str, run_folder: Path | None = None) -> None:
        super().__init__(local)
        self.name, self._run_folder = uri, run_folder or local
        self._store = _open_store(uri)
        self._index: Index | None = None  # the index on the store as this process knows it; None if there is none
        self._replaces: UpdateVersion | None = None  # the manifest on the store, likewise
        self._owner = Writer.me()
        self._versions: dict[str, str] = {}  # files of versions, with their digests
        self._read: set[str] = set()  # parts of the table of versions that were read
        self._swept = False

    @override
    def manifest(self) -> Manifest | None:
        with self._explain():
            self._refresh()
        return self._index.manifest if self._index else None

    @override
    def pull(self) -> None:
        """Make the local folder equal to the commit on the store; digests are checked, other local files removed.

        No other process may use the folder during the call. Partitions in it do not change.
        """
        self._take(self._pull)

    def fetch(self) -> None:
        """Fetch the log into the local folder, for reading only, without checkpoint and versions.

        Files that were fetched before are not checked again. Raises RunError if the store has no manifest.
        """
        self._take(self._fetch)

    @override
    def acquire(self, manifest: Manifest) -> None:
        self.push(manifest)

    @override
    def push(self, manifest: Manifest) -> None:
        """Upload a commit, then remove objects from the store that it does not name.

        Raises RunError if another process, which the message names, wrote since this one read or wrote the manifest.
        """
        self._note_versions(manifest)
        paths = [path for path in self._local.iterdir() if path.is_file() and not path.name.startswith(".")]
        small = {path.name: path.read_bytes() for path in paths}  # others may be appended to meanwhile
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in small.items()}
        index = Index(manifest, self._owner, {**self._versions, **digests})
        before = self._index.digests() if self._index else frozenset()
        new = {digest: path for path, digest in index.all_files().items() if digest not in before}

        def upload(digest: str) -> None:
            path = self._local_path(new[digest])
            if new[digest] not in small and digest_of(path) != digest:
                raise CorruptError(f"{path} must have the digest {digest[:12]}... that was committed, but was changed")
            self._store.put(f"{OBJECTS}/{digest}", small.get(new[digest], path))
            fault_point("mirror: between two objects")

        with self._explain():
            # Once, what killed processes left. It is listed before this commit, as others may write right after it.
            gone = (before if self._swept else frozenset(self._list_objects())) - index.digests()
            _for_each(upload, new)
            fault_point("mirror: before the manifest")
            self._replace_manifest(index)
            fault_point("mirror: after the manifest")
            self._swept = True
        with suppress(BaseError, FileNotFoundError):  # the commit is done; a later process removes the objects
            self._store.delete([f"{OBJECTS}/{digest}" for digest in gone])

    @override
    def partitions(self) -> list[str]:
        with self._explain():
            found = self._store.list_with_delimiter(PARTITIONS)["common_prefixes"]
        return sorted(PurePosixPath(prefix).name for prefix in found)

    @override
    def partition(self, name: str) -> "ObjectMirror":
        return ObjectMirror(
            partition_folder(self._local, name), f"{self.name.rstrip('/')}/{PARTITIONS}/{name}", self._local
        )

    @contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            reason, _, _ = str(error).partition("\n")  # a trace of Rust's follows
            raise OmnidraftError(f"{self.name} must be reachable, but: {reason}") from error

    def _list_objects(self) -> list[str]:
        found = self._store.list_with_delimiter(OBJECTS)["objects"]
        return [PurePosixPath(one["path"]).name for one in found]

    def _refresh(self) -> bytes | None:
        """Read the manifest on the store; None if there is none. Raises CorruptError if it is not valid."""
        try:
            found = self._store.get(MANIFEST.as_posix())
        except FileNotFoundError:
            self._index, self._replaces = None, None
            return None
        content = bytes(found.bytes())
        self._index = Index.parse(f"{self.name}/{MANIFEST}", content)
        self._replaces = _version_of(found.meta)
        return content

    def _replace_manifest(self, index: Index) -> None:
        """Replace the manifest, if it is still the one that this process knows."""
        content = index.to_json()
        try:
            put = self._store.put(MANIFEST.as_posix(), content, mode=self._replaces or "create")
            self._index, self._replaces = index, _version_of(put)
        except (AlreadyExistsError, PreconditionError):
            if self._refresh() != content:  # otherwise this request was repeated after it had been done
                owner = self._index.owner if self._index else "somebody who removed its manifest"
                raise RunError(
                    f"{self.name} must not be written by two processes, but {owner} wrote it since this one did; what "
                    "this one did since its last commit is dropped. Let the other continue, or name another place with "
                    "--run"
                ) from None

    def _note_versions(self, manifest: Manifest) -> None:
        """Add the files of the versions that the log names; these are sealed and never changed."""
        for part in manifest.tables["versions"]:
            if part.file not in self._read:
                for folder in read_part(self._local, part, ["folder"])["folder"].to_pylist():
                    sealed = self._run_folder / folder
                    for name, digest in read_version(sealed)["files"].items():
                        self._versions[f"{folder}/{name}"] = digest
                    self._versions[f"{folder}/{VERSION_MANIFEST}"] = str(digest_of(sealed / VERSION_MANIFEST))
                self._read.add(part.file)

    def _local_path(self, path: str) -> Path:
        return (self._run_folder if path.startswith(VERSIONS) else self._local) / path

    def _take(self, take: Callable[[Index | None], None]) -> None:
        """Take the files of the manifest, then the manifest; retry if another process commits in between."""
        with self._explain():
            for left in reversed(range(_PURSUITS)):
                content = self._refresh()
                try:
                    take(self._index)
                    break
                except CorruptError:
                    if not left or self._refresh() == content:
                        raise
        if content is not None:
            (self._local / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._local / MANIFEST, content)

    def _pull(self, index: Index | None) -> None:
        files = index.all_files() if index else {}
        self._remove_others(files)
        self._download({path: one for path, one in files.items() if one != digest_of(self._local_path(path))})

    def _fetch(self, index: Index | None) -> None:
        if index is None:
            raise RunError(f"{self.name} must be a run, but has no {MANIFEST}; see --run")
        files = {path: one for path, one in index.files.items() if not path.startswith(VERSIONS)}
        before: Files = {}
        with suppress(OSError, OmnidraftError):
            before = Index.parse(str(self._local), (self._local / MANIFEST).read_bytes()).all_files()
        self._download(
            {
                path: one
                for path, one in {**index.parts(), **files}.items()
                if before.get(path) != one or not self._local_path(path).exists()
            }
        )

    def _remove_others(self, files: Files) -> None:
        kept = {self._local_path(path) for path in files}
        for found in list(self._local.rglob("*")):
            foreign = found.relative_to(self._local).parts[0] in _NOT_OF_IT
            if not foreign and found not in kept and not found.is_dir():
                found.unlink()

    def _download(self, files: Files) -> None:
        def download(path: str) -> None:
            place = self._local_path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_chunks(place, self._read_checked(path, files[path]))

        _for_each(download, files)

    def _read_checked(self, path: str, digest: str) -> Iterator[bytes]:
        """Yield the content of an object in chunks; raise `CorruptError` after the last one if the digest differs."""
        found, name = hashlib.sha256(), f"{OBJECTS}/{digest}"
        try:
            for chunk in self._store.get(name).stream(min_chunk_size=CHUNK):
                found.update(chunk)
                yield bytes(chunk)
        except FileNotFoundError:
            raise CorruptError(f"{path} of {self.name} must be in {name}, which is not there; restore it") from None
        if found.hexdigest() != digest:
            raise CorruptError(
                f"{path} of {self.name} must be in {name}, but that was changed or cut short; restore it"
            )


def mirror_of(local: Path, uri: str | None) -> Mirror:
    """Return the mirror of the commits in a run's local folder; without a URI, one that copies nothing."""
    return ObjectMirror(local, uri) if uri else Mirror(local)


def local_copy(run: Path) -> Path:
    """Return the folder to read a run from: the run's own, or the one that it is fetched into."""
    uri = uri_of(run)
    return fetch_logs(uri) if uri else run


def fetch_logs(uri: str) -> Path:
    """Fetch the committed logs of a run and its partitions; return the local folder, for reading only.

    Only files that are new since the last call are fetched. Raises what `ObjectMirror.fetch` raises.
    """
    local = cache_folder("read", uri)
    run = ObjectMirror(local, uri)
    partitions = run.partitions()
    local.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(local.parent / LOCK):
        for other in (path for path in (local / PARTITIONS).glob("*") if path.name not in partitions):
            shutil.rmtree(other)  # of another run that had the same name
        for name in reversed(partitions):  # workers before the learner, and the run itself last
            partition = run.partition(name)
            if partition.manifest() is not None:
                partition.fetch()
        run.fetch()
    return local


def _open_store(uri: str) -> ObjectStore:
    scheme, _, rest = uri.partition("://")
    bucket, _, path = rest.partition("/")
    path = path.strip("/")
    if not bucket or "@" in bucket or {"", ".", ".."} & set(path.split("/")) or {"?", "\\"} & set(rest):
        raise RunError(
            "a run on an object store must be named s3://BUCKET/PATH, without options, and its keys must be in the "
            f"environment; got {scheme}://.../{path.partition('?')[0]}"
        )
    store = S3Store if scheme == "s3" else GCSStore
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS") or ATTEMPTS)
    try:
        return store(
            bucket,
            prefix=path,
            client_options={
                "allow_http": True,  # for a server that is named by an address of http
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "read_timeout": timedelta(seconds=READ_SECONDS),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            retry_config={
                "max_retries": attempts - 1,
                "backoff": {"init_backoff": timedelta(seconds=1), "max_backoff": timedelta(seconds=10), "base": 2},
            },
        )
    except (BaseError, ValueError) as error:
        raise RunError(f"{uri} must be an object store that can be opened, but: {error}") from error


def _version_of(found: "ObjectMeta | PutResult") -> "UpdateVersion":
    known: UpdateVersion = {}
    if found["e_tag"]:
        known["e_tag"] = found["e_tag"]
    if found["version"]:
        known["version"] = found["version"]
    return known


def _for_each(do: Callable[[_T], None], over: Iterable[_T]) -> None:
    """Call `do` for several items in parallel; after all are done, raise the first error."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(do, over))
