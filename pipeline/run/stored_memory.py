"""The memories of a run that is not running: read from its checkpoint or its newest versions, and edited there. A
prompt that is to be forgotten is read from the log.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pipeline.assembly.admission import Admission
from pipeline.assembly.models import load_models, registry_uri
from pipeline.config.settings import load
from pipeline.run.folder import CONFIG
from stages.contract.snapshot import TENSORS, Snapshot, State, read_snapshot
from stages.memory.ngram_table import NgramTable
from stages.memory.text_memory import MEMORY_FILE, read_table
from store.errors import RunError
from store.events import PromptReceived
from store.log.checkpoint import read_checkpoint, remove_other_checkpoints, write_checkpoint
from store.log.lock import RunLock
from store.log.manifest import edit_manifest, read_manifest, replace_previous
from store.query.log_reader import LogReader


@dataclass(frozen=True)
class StoredMemory:
    """The memory of one target, and the file that it was read from, relative to the run's folder."""

    target: str
    table: NgramTable
    file: str


def read_memories(run_folder: Path) -> list[StoredMemory]:
    """Return the memories of a run: of its checkpoint if it can be resumed, else of each target's newest version."""
    checkpoint = read_manifest(run_folder).checkpoint
    if checkpoint:
        state = read_snapshot(read_checkpoint(run_folder, checkpoint))
        tables = {target: NgramTable.from_state(memory["table"]) for target, memory in _find_memories(state).items()}
        found = [StoredMemory(target, table, f"{checkpoint.folder}/{TENSORS}") for target, table in tables.items()]
    else:
        found = _read_versions(run_folder)
    if not found:
        raise RunError(
            f"{run_folder} must hold a memory, in its checkpoint or in a version, but it has none; "
            "is 'memory' among its draft.sources?"
        )
    return found


def _find_memories(state: State) -> dict[str, State]:
    """Return the state of each target's memory in a checkpoint. A run over several machines has none."""
    runners = state["loop"]["runners"] if "loop" in state else {}
    memories = {target: runner["stages"][0]["memory"] for target, runner in runners.items()}
    return {target: memory for target, memory in memories.items() if memory["table"]}


def _read_versions(run_folder: Path) -> list[StoredMemory]:
    found: dict[str, StoredMemory] = {}
    for path in sorted((run_folder / "versions").glob(f"*/{MEMORY_FILE}")):  # names sort by number
        target = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))["target"]
        found[target] = StoredMemory(target, read_table(path), str(path.relative_to(run_folder)))
    return list(found.values())


def edit_memories(run_folder: Path, edit: Callable[[str, NgramTable], None]) -> None:
    """Edit the memories in the checkpoint of a run that is not running, and remove the old checkpoint."""
    with RunLock(run_folder):
        checkpoint = read_manifest(run_folder).checkpoint
        if checkpoint is None:
            raise RunError(
                f"{run_folder} must have a checkpoint to forget from, but it is finished; delete its versions instead"
            )
        state = read_snapshot(read_checkpoint(run_folder, checkpoint))
        for target, memory in _find_memories(state).items():
            table = NgramTable.from_state(memory["table"])
            edit(target, table)
            memory["table"] = table.state_dict()
        written = write_checkpoint(run_folder, int(Path(checkpoint.folder).name) + 1, Snapshot(state).files())
        edit_manifest(run_folder, lambda manifest: replace(manifest, checkpoint=written))
        replace_previous(run_folder)  # which names the old checkpoint
        remove_other_checkpoints(run_folder, written)


class LoggedText(NamedTuple):
    """A prompt and its completion in target tokens."""

    target: str
    tokens: list[int]
    prompt_length: int


def read_logged_text(run_folder: Path, offset: int) -> LoggedText:
    """Return the tokens of a prompt and of its completion. The prompt is tokenised again, so models are loaded."""
    with LogReader([run_folder]) as log:
        prompts = log.select(
            f'SELECT target, dataset, prompt_id, prompt_text FROM prompts WHERE "offset" = {offset}', 1
        )
        emitted = log.select(
            f'SELECT emitted_id FROM decisions WHERE "offset" = {offset} AND emitted_id IS NOT NULL ORDER BY position',
            None,
        )
    if not prompts.num_rows:
        raise RunError(f"the log of {run_folder} must hold the prompt to forget, but has no offset {offset}")
    row = prompts.to_pylist()[0]
    if not row["prompt_text"]:
        raise RunError(
            f"the prompt {offset} of {run_folder} must have been logged with its text (log.text), but was not"
        )
    config = load(run_folder / CONFIG)
    models = next(
        one for one in load_models(config, registry_uri(config.publish), run_folder) if one.name == row["target"]
    )
    tokens, _ = Admission(config, models).encode(
        PromptReceived(offset, row["prompt_id"], row["dataset"], 1, row["prompt_text"])
    )
    return LoggedText(row["target"], [*tokens, *(one["emitted_id"] for one in emitted.to_pylist())], len(tokens))
