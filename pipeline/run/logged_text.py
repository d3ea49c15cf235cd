"""The tokens of a completed prompt, from the log."""

from pathlib import Path
from typing import NamedTuple

from pipeline.assembly.admission import Admission
from pipeline.assembly.models import load_models, registry_uri
from pipeline.config.settings import load
from store.errors import RunError
from store.events import PromptReceived
from store.query.log_reader import LogReader


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
    config = load(run_folder / "config.json")
    models = next(
        one for one in load_models(config, registry_uri(config.publish), run_folder) if one.name == row["target"]
    )
    tokens, _ = Admission(config, models).encode(
        PromptReceived(offset, row["prompt_id"], row["dataset"], 1, row["prompt_text"])
    )
    return LoggedText(row["target"], [*tokens, *(one["emitted_id"] for one in emitted.to_pylist())], len(tokens))
