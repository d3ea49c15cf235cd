"""Write and read checkpoints: folders of files that a commit names with their digests.

    RUN/checkpoint/000012/state.json        numbers, texts and references; see stages/contract/snapshot.py
    RUN/checkpoint/000012/tensors.safetensors
    RUN/checkpoint/000012/weights.safetensors   often the same file as that of the checkpoint before, by a hard link

A checkpoint is one consistent state of a run between two blocks. The pipeline defines its content; this module only
makes sure that its files are complete.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from store.errors import CorruptError
from store.fault_points import fault_point
from store.files import link_or_copy, sync_folder, write_synced
from store.log.manifest import Checkpoint

FOLDER = "checkpoint"


def write_checkpoint(
    run_folder: Path,
    number: int,
    files: Mapping[str, bytes],
    kept: Iterable[str] = (),
    before: Checkpoint | None = None,
) -> Checkpoint:
    """Write the files of a checkpoint, which is not visible before the manifest names it. `kept`: names of further
    files, which are those of the checkpoint `before`.
    """
    folder = run_folder / FOLDER / f"{number:06d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        write_synced(folder / name, [content])
        fault_point("commit: inside the checkpoint")
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    for name in kept:
        if before is None or name not in before.files:
            raise CorruptError(f"{run_folder} must have {name} in its last checkpoint, which a new one keeps")
        link_or_copy(run_folder / before.folder / name, folder / name)
        digests[name] = before.files[name]
    for made in (folder, folder.parent, run_folder):
        sync_folder(made)
    return Checkpoint(f"{FOLDER}/{folder.name}", digests)


def read_checkpoint(run_folder: Path, checkpoint: Checkpoint) -> dict[str, bytes]:
    """Read the files of a committed checkpoint, by name. Raises `CorruptError` if one is missing or was changed."""
    return {
        name: _read_checked(run_folder / checkpoint.folder / name, digest) for name, digest in checkpoint.files.items()
    }


def _read_checked(path: Path, digest: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptError(
            f"{path} must be there to resume from, but: {error.strerror or error}; restore it"
        ) from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CorruptError(
            f"{path} must have the digest {digest[:12]}... that was committed, but it was changed or cut short; "
            "restore it from a copy. The log up to the last commit can still be read"
        )
    return content


def remove_other_checkpoints(run_folder: Path, *kept: Checkpoint | None) -> None:
    """Remove all checkpoints except those given: the committed one, and that of the manifest's predecessor."""
    root, names = run_folder / FOLDER, {Path(one.folder).name for one in kept if one}
    if root.is_dir():
        for folder in root.iterdir():
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)
