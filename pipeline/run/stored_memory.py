"""The memories of a run that is not running: read from its checkpoint or its newest versions, and edited there."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from pipeline.loop_state import LoopState
from stages.contract.snapshot import STATE, TENSORS, SnapshotReader
from stages.memory.memory_file import MEMORY_FILE, read_table
from stages.memory.ngram_table import SLOT_BYTES, NgramTable, NgramTableState
from store.errors import RunError
from store.log.checkpoint import read_checkpoint, remove_other_checkpoints, write_checkpoint
from store.log.lock import RunLock
from store.log.manifest import edit_manifest, read_manifest


@dataclass(frozen=True)
class StoredMemory:
    """The memory of one target, and the file that it was read from, relative to the run's folder."""

    target: str
    table: NgramTable
    file: str


def read_memories(run_folder: Path) -> list[StoredMemory]:
    """Return the memories of a run: of its checkpoint if it can be resumed, else of the newest version of each target.

    Raises:
        RunError: the run has neither.
        CorruptError: a file is not as it was written.
    """
    checkpoint = read_manifest(run_folder).checkpoint
    if checkpoint:
        reader = SnapshotReader(read_checkpoint(run_folder, checkpoint))
        tables = {target: _restore(reader, saved) for target, saved in _find_tables(reader, reader.state).items()}
        found = [StoredMemory(target, table, f"{checkpoint.folder}/{TENSORS}") for target, table in tables.items()]
    else:
        found = _read_versions(run_folder)
    if not found:
        raise RunError(
            f"{run_folder} must hold a memory, in its checkpoint or in a version, but it has none; "
            "is 'memory' among its draft.sources?"
        )
    return found


def _find_tables(reader: SnapshotReader, state: Any) -> dict[str, Any]:
    """Return the saved table of each target of a checkpoint, as part of its state. A run over several machines has
    none.
    """
    if "loop" not in state:
        return {}
    runners = reader.decode(LoopState, state["loop"]).runners
    chosen: dict[str, Any] = {target: runner.stages[0] for target, runner in runners.items()}
    return {target: stage["memory"]["table"] for target, stage in chosen.items() if stage["memory"]["table"]}


def _restore(reader: SnapshotReader, saved: Any) -> NgramTable:
    table = NgramTable(saved["slots"] * SLOT_BYTES)
    table.restore(saved, reader)
    return table


def _read_versions(run_folder: Path) -> list[StoredMemory]:
    found: dict[str, StoredMemory] = {}
    for path in sorted((run_folder / "versions").glob(f"*/{MEMORY_FILE}")):  # names sort by number
        target = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))["target"]
        found[target] = StoredMemory(target, read_table(path), str(path.relative_to(run_folder)))
    return list(found.values())


def edit_memories(run_folder: Path, edit: Callable[[str, NgramTable], None]) -> None:
    """Edit the memories in the checkpoint of a run that is not running, and remove the old checkpoint.

    Args:
        run_folder: of a run that can be resumed.
        edit: changes a target's table in place.

    Raises:
        RunError: a process runs the run, or it has no checkpoint.
        CorruptError: the checkpoint is not as it was written.
        OSError: the folder cannot be written; the old checkpoint is then intact.
    """
    with RunLock(run_folder):
        checkpoint = read_manifest(run_folder).checkpoint
        if checkpoint is None:
            raise RunError(
                f"{run_folder} must have a checkpoint to forget from, but it is finished; delete its versions instead"
            )
        files = read_checkpoint(run_folder, checkpoint)
        reader, value, tensors = SnapshotReader(files), json.loads(files[STATE]), load(files[TENSORS])
        for target, saved in _find_tables(reader, value["state"]).items():
            numbers = reader.decode(NgramTableState, saved).arrays
            table = _restore(reader, saved)
            edit(target, table)
            saved["slots"], saved["clock"] = table.sizes
            tensors |= {str(numbers[name]): tensor for name, tensor in table.to_tensors().items()}
        edited = {**files, STATE: json.dumps(value, separators=(",", ":")).encode(), TENSORS: save(tensors)}
        written = write_checkpoint(run_folder, int(Path(checkpoint.folder).name) + 1, edited)
        edit_manifest(run_folder, lambda manifest: replace(manifest, checkpoint=written))
        remove_other_checkpoints(run_folder, written)
