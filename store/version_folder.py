"""A version on disk: a folder of weights, tokenizer, head and n-gram cache, sealed by a manifest of digests.

    config.json, model.safetensors, tokenizer files    the drafter, as Hugging Face writes it
    head.safetensors                                   the adaptive head (optional)
    ngrams.parquet                                     the n-gram cache (optional)
    manifest.json                                      where it came from, and the sha256 of every file above

Nothing in it is ever unpickled, and no code of it is ever run: files that could hold either are refused on the way in
and on the way out.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import TypedDict, cast

from store.errors import CorruptError, UsageError
from store.files import sync_file, sync_folder

MANIFEST = "manifest.json"
_PART = f".{MANIFEST}.part"
MANIFEST_BYTES = 1 << 20  # at most; some hundred are usual per file
PICKLE_SUFFIXES = frozenset({".pkl", ".pickle", ".pt", ".bin", ".pth", ".ckpt", ".joblib", ".dill", ".npy", ".npz"})
CODE_SUFFIXES = frozenset({".py", ".pyc", ".so", ".h5", ".keras", ".zip"})
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ManifestFields(TypedDict):
    """What the caller says about a version; `seal` adds the files and the digest."""

    name: str  # of the registered model
    version: int  # within the run, from 0
    parent: int | None  # within the run; None for the floor
    run: str
    offset: int  # stream offset of the last prompt it learned from
    target: str
    drafter: str
    pair: str  # digest of the two vocabularies
    counters: Mapping[str, int]  # drafter, head and cache versions, cache entries, ...
    created_at: str  # ISO 8601, UTC


class Manifest(ManifestFields):
    """A manifest as it is read back."""

    files: dict[str, str]  # path relative to the folder, with "/": sha256 in hexadecimal
    digest: str


_TEXTS = ("name", "run", "target", "drafter", "pair", "created_at", "digest")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_TEXTS, (str,)),
    "version": (int,),
    "offset": (int,),
    "parent": (int, NoneType),
    "counters": (dict,),
}


def seal(folder: Path, fields: ManifestFields) -> str:
    """Write `manifest.json` over everything now in the folder, atomically, and return the version's digest.

    The digest covers names and contents of the files, not the manifest's other fields: equal weights have equal
    digests in whichever run they arose. Sealing again replaces the manifest. Raises CorruptError for what a version
    may not hold (a pickle, a link, nothing at all).
    """
    (folder / _PART).unlink(missing_ok=True)  # of a sealing that was cut short
    files = {name: _sha256(folder / name) for name in _file_names(folder)}
    if not files:
        raise CorruptError(f"a version must hold files, but {folder} is empty: write the drafter there before sealing")
    _sync(folder, files)
    digest = digest_of(files)
    _write_atomically(folder / MANIFEST, json.dumps({**fields, "files": files, "digest": digest}, indent=2) + "\n")
    return digest


def open_version(folder: Path) -> Manifest:
    """The manifest, after every file was found to be what it says.

    Raises CorruptError naming the file: missing, unlisted, changed, a link, of a kind that may hold a pickle or code,
    or listed under a path that leaves the folder. Reads every byte once.
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
    """sha256 over the sorted names and hashes, one `hash name` line each."""
    return hashlib.sha256("".join(f"{files[name]} {name}\n" for name in sorted(files)).encode()).hexdigest()


def folder_beside(into: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the disk of `into`, for files that are to become `into` when they were checked.

    Raises UsageError unless `into` is absent or an empty folder, and can be made.
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


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone; whether the files are as it says, only `open_version` tells. Raises CorruptError."""
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise CorruptError(f"a version must hold {MANIFEST}, but {folder} has none: it is no version, or was cut short")
    size = path.stat().st_size
    if size > MANIFEST_BYTES:
        raise CorruptError(f"{path} must have at most {MANIFEST_BYTES} bytes, got {size}; fetch the version again")
    try:
        manifest = json.loads(path.read_bytes(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} must be JSON, but: {error}; fetch the version again") from error
    if not isinstance(manifest, dict) or not _is_file_table(manifest.get("files")):
        raise CorruptError(f"{path} must list the sha256 of every file under 'files'; fetch the version again")
    missing = Manifest.__required_keys__ - manifest.keys()
    if missing:
        raise CorruptError(f"{path} must name {', '.join(sorted(missing))}; fetch the version again")
    for name, kinds in _KINDS.items():
        if not isinstance(manifest[name], kinds):
            raise CorruptError(
                f"{path} has {manifest[name]!r} for {name!r}, of the wrong kind; fetch the version again"
            )
    return cast(Manifest, manifest)


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A name that is there twice could mean one thing here and another elsewhere."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _is_file_table(files: object) -> bool:
    return isinstance(files, dict) and all(isinstance(d, str) and _SHA256.fullmatch(d) for d in files.values())


def _file_names(folder: Path) -> list[str]:
    """Sorted paths relative to the folder, without the manifest; refuses what a version may not hold."""
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
    folders = [folder]  # not by recursion: a hostile folder may be deep
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
        name = names[0].encode(errors="backslashreplace").decode()  # what a terminal can print
        raise CorruptError(f"the version in {folder} cannot be trusted: {name} {what}; fetch or publish it again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path, names: Iterable[str]) -> None:
    """Bring all files and the names of all folders onto the disk: a commit is going to name the version."""
    paths = [folder / name for name in names]
    for path in paths:
        sync_file(path)
    for made in {path.parent for path in paths} | {folder, folder.parent}:
        sync_folder(made)


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(_PART)
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
