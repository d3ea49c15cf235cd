"""Checkpoints on disk: folders of files that a commit names with their digests.

    RUN/checkpoint/000012/state.json        numbers, texts and references; see stages/snapshot.py
    RUN/checkpoint/000012/tensors.safetensors

A checkpoint is one consistent state of a run between two blocks. What is in it is the pipeline's business; here it is
files that are whole or not there.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from store import faults
from store.errors import CorruptError
from store.files import sync_folder
from store.manifest import Checkpoint

FOLDER = "checkpoint"


def write_checkpoint(run_folder: Path, number: int, files: Mapping[str, bytes]) -> Checkpoint:
    """Write the files of a checkpoint; nobody sees it before the manifest names it. Raises OSError."""
    folder = run_folder / FOLDER / f"{number:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        with open(folder / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        faults.reach("commit: inside the checkpoint")
    for made in (folder, folder.parent, run_folder):
        sync_folder(made)
    return Checkpoint(f"{FOLDER}/{folder.name}", {name: hashlib.sha256(files[name]).hexdigest() for name in files})


def read_checkpoint(run_folder: Path, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files of a committed checkpoint.

    Raises:
        CorruptError: a file is missing or not what was committed; it is named.
    """
    return {name: _checked(run_folder / checkpoint.folder / name, digest) for name, digest in checkpoint.files.items()}


def _checked(path: Path, digest: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptError(f"{path} must be there to go on from, but: {error.strerror or error}; restore it") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CorruptError(
            f"{path} must have the digest {digest[:12]}... that was committed, but it was changed or cut short; "
            "restore it from a copy. The log up to the last commit can still be read"
        )
    return content


def remove_others(run_folder: Path, kept: Checkpoint | None) -> None:
    """Remove all checkpoints but the one that is committed."""
    root = run_folder / FOLDER
    if root.is_dir():
        for folder in root.iterdir():
            if kept is None or folder != run_folder / kept.folder:
                shutil.rmtree(folder, ignore_errors=True)
