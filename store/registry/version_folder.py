"""A version on disk: a folder of weights, tokenizer, head and n-gram cache, sealed by a manifest of digests.

    config.json, model.safetensors, tokenizer files    the drafter, as Hugging Face writes it
    head.safetensors                                   the adaptive head (optional)
    ngrams.parquet                                     the n-gram cache (optional)
    memory.safetensors, sums.safetensors               the memory, and sums that further updates need (optional)
    manifest.json                                      its origin, and the SHA-256 of every file above

Nothing in the folder is ever unpickled, and no code in it is ever run: files that could hold either are refused when a
version is sealed and when it is opened.
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from store.errors import CorruptError, UsageError
from store.files import sync_file, sync_folder, write_whole

MANIFEST = "manifest.json"
BESIDE_DRAFTER = frozenset({"head.safetensors", "ngrams.parquet", "memory.safetensors", "sums.safetensors"})
MANIFEST_BYTES = 1 << 20  # maximum size; some hundred bytes per file are usual
PICKLE_SUFFIXES = frozenset({".pkl", ".pickle", ".pt", ".bin", ".pth", ".ckpt", ".joblib", ".dill", ".npy", ".npz"})
CODE_SUFFIXES = frozenset({".py", ".pyc", ".so", ".h5", ".keras", ".zip"})


Counters = Mapping[str, int]  # `drafter`, `head`, `cache`: changes so far; `cache_entries`, `memory_tokens`: sizes


class ManifestFields(TypedDict):
    """Fields of a manifest from the caller; `seal` adds the files and the digest."""

    name: str  # of the registered model
    version: int  # within the run, from 0
    parent: int | None  # within the run; None for the baseline
    run: str
    offset: int  # stream offset of the last prompt before it
    target: str
    drafter: str
    pair: str  # digest of the two vocabularies
    counters: Counters
    created_at: str  # ISO 8601, UTC
    drift: str | None  # description of the drift to which it is the first response
    metrics: Mapping[str, float]  # `window_...` were measured on the stream since the parent, the others on the probe


class VersionManifest(ManifestFields):
    """A manifest as it is read from the file."""

    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]  # path relative to the folder, with "/": sha256
    digest: str


_MANIFEST = TypeAdapter(VersionManifest)


def seal(folder: Path, fields: ManifestFields) -> str:
    """Write `manifest.json` for all files in the folder, atomically, and return the version's digest.

    The digest covers names and contents of the files, not the manifest's other fields, so equal weights from different
    runs have equal digests. Sealing again replaces the manifest. Raises CorruptError for a folder that has a pickle or
    a link, or is empty.
    """
    for part in folder.glob(f".{MANIFEST}.*"):  # of a sealing that was interrupted
        part.unlink()
    files = {name: _sha256(folder / name) for name in _file_names(folder)}
    if not files:
        raise CorruptError(f"a version must hold files, but {folder} is empty: write the drafter there before sealing")
    _sync(folder, files)
    digest = digest_of(files)
    text = json.dumps({**fields, "files": files, "digest": digest}, indent=2) + "\n"
    write_whole(folder / MANIFEST, text.encode())
    return digest


def open_version(folder: Path) -> VersionManifest:
    """Check every file against the manifest and return the manifest. Reads every byte once.

    Raises CorruptError for a file, which it names, that is missing, unlisted, changed, a link, may hold a pickle or
    code, or is listed under a path outside the folder.
    """
    manifest = read_manifest(folder)
    files = manifest["files"]
    for name in files:
        _refuse_path(folder, name)
    found = set(_file_names(folder))
    _refuse(folder, sorted(files.keys() - found), "is missing")
    _refuse(folder, sorted(found - files.keys()), "is not listed in the manifest")
    _refuse(folder, [name for name, digest in files.items() if _sha256(folder / name) != digest], "was changed")
    if digest_of(files) != manifest["digest"]:
        _refuse(folder, [MANIFEST], "names a digest that is not that of its files")
    return manifest


def digest_of(files: Mapping[str, str]) -> str:
    """Return the SHA-256 over the sorted names and hashes, one `hash name` line each."""
    return hashlib.sha256("".join(f"{files[name]} {name}\n" for name in sorted(files)).encode()).hexdigest()


def digest_drafter(manifest: VersionManifest) -> str:
    """Return the digest of the drafter's own files, which is equal for versions with equal drafters."""
    return digest_of({name: one for name, one in manifest["files"].items() if name not in BESIDE_DRAFTER})


def describe_changes(
    before: Counters,
    after: Counters,
    *,
    drafter_changed: bool,
    held_out: tuple[float | None, float | None] = (None, None),
) -> str:
    """Say what differs between two states of a drafter, and by how much; "" for nothing. `held_out`: its acceptance on
    held-out prompts now and as loaded.

    >>> one = {"drafter": 2, "head": 0, "cache": 9, "cache_entries": 9, "memory_tokens": 0}
    >>> describe_changes(one, {**one, "cache": 62, "cache_entries": 62, "memory_tokens": 1728}, drafter_changed=False)
    'drafter unchanged; n-grams +53, memory +1,728 tokens'
    >>> describe_changes(one, {**one, "drafter": 3}, drafter_changed=True, held_out=(0.646, 0.312))
    'drafter +1 update (0.646 of held-out tokens, as loaded 0.312)'
    """
    found = describe_additions(before, after)
    drafter, (now, loaded) = "drafter unchanged", held_out
    if drafter_changed:
        known = "" if now is None or loaded is None else f" ({now:.3f} of held-out tokens, as loaded {loaded:.3f})"
        drafter = f"drafter {_format_updates(after['drafter'] - before['drafter'])}{known}"
    return "; ".join(filter(None, [drafter, found])) if found or drafter_changed else ""


def describe_additions(before: Counters, after: Counters) -> str:
    """Say what differs between two states besides the drafter; "" for nothing."""
    more = Counter(after)
    more.subtract(before)
    entries = f"n-grams {more['cache_entries']:+,}" if more["cache_entries"] else "n-grams replaced"
    parts = [
        f"head {_format_updates(more['head'])}" if more["head"] else "",
        entries if more["cache"] else "",
        f"memory {more['memory_tokens']:+,} tokens" if more["memory_tokens"] else "",
    ]
    return ", ".join(filter(None, parts))


def _format_updates(count: int) -> str:
    return f"{count:+,} update{'' if count == 1 else 's'}"


def create_temporary_folder(into: Path) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder on the disk of `into`, to be renamed to `into` after its files were checked.

    Raises UsageError unless `into` is absent or an empty folder, and can be created.
    """
    try:
        taken = into.exists() and any(into.iterdir())
        into.parent.mkdir(parents=True, exist_ok=True)
        part = None if taken else tempfile.TemporaryDirectory(dir=into.parent)
    except OSError as error:
        raise UsageError(
            f"a version must be fetched into a folder that can be written, but: {error}; name another"
        ) from error
    if part is None:
        raise UsageError(f"a version must be fetched into a new or empty folder, but {into} holds files; name another")
    return part


def read_manifest(folder: Path) -> VersionManifest:
    """Read the manifest without checking the files, which `open_version` does. Raises CorruptError."""
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CorruptError(f"a version must hold {MANIFEST}, but {folder} has none: it is no version, or was cut short")
    size = path.stat().st_size
    if size > MANIFEST_BYTES:
        raise CorruptError(f"{path} must have at most {MANIFEST_BYTES} bytes, got {size}; fetch the version again")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} must be JSON, but: {error}; fetch the version again") from error
    try:
        _MANIFEST.validate_python(manifest, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CorruptError(
            f"{path} has nothing for '{place}', or something of the wrong kind: {first['msg']}; fetch the version again"
        ) from error
    return cast("VersionManifest", manifest)  # with any further fields


def _file_names(folder: Path) -> list[str]:
    """Return sorted paths relative to the folder, without the manifest; refuse files that a version may not hold."""
    names = []
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        _refuse_path(folder, name)
        if path.is_symlink() or not path.is_file():
            _refuse(folder, [name], "is a link or a device, not a plain file")
        if name != MANIFEST:
            names.append(name)
    return sorted(names)


def _walk(folder: Path) -> Iterator[Path]:
    folders = [folder]  # iterative, since a hostile folder may be deep
    while folders:
        for entry in os.scandir(folders.pop()):
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            else:
                yield Path(entry.path)


def _refuse_path(folder: Path, name: str) -> None:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or path.as_posix() != name or not name.isprintable():
        _refuse(folder, [name], "is a path that leaves the folder or is not in plain form")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        _refuse(folder, [name], "may hold a pickle, which would run code when loaded (weights must be safetensors)")
    if path.suffix.lower() in CODE_SUFFIXES:
        _refuse(folder, [name], "may hold code, and none of a version is ever run")


def _refuse(folder: Path, names: list[str], what: str) -> None:
    if names:
        name = names[0].encode(errors="backslashreplace").decode()  # so that a terminal can print it
        raise CorruptError(f"the version in {folder} cannot be trusted: {name} {what}; fetch or publish it again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path, names: Iterable[str]) -> None:
    """Sync all files and folders to disk, since a commit will name the version."""
    paths = [folder / name for name in names]
    for path in paths:
        sync_file(path)
    for made in {path.parent for path in paths} | {folder, folder.parent}:
        sync_folder(made)
