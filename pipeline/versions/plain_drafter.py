"""The drafter of a version's folder as a model of `transformers`, for use outside this project."""

from pathlib import Path
from typing import Any

from stages.engine.models.adapters import ADAPTER_FOLDER, merge_lora
from stages.engine.models.huggingface import load_causal_model, load_tokenizer, raise_write_errors


def load_plain_drafter(version: Path) -> tuple[Any, Any]:
    """The drafter of a version's folder as a model and tokenizer of `transformers`, on the CPU and in the type that it
    was saved in; an adapter that it was saved with is merged. The files must have been checked.
    """
    model, tokenizer = load_causal_model(str(version), "auto", "cpu"), load_tokenizer(str(version))
    if (version / ADAPTER_FOLDER).is_dir():
        model = merge_lora(model, str(version / ADAPTER_FOLDER))
    return model, tokenizer


def export_drafter(version: Path, into: Path, draft_length: int) -> int:
    """Write the drafter of a checked version folder to another folder; return its number of parameters.

    `draft_length`: pieces per draft for `transformers`, instead of its default of 20.
    """
    model, tokenizer = load_plain_drafter(version)
    model.generation_config.update(num_assistant_tokens=draft_length, num_assistant_tokens_schedule="constant")
    with raise_write_errors(into):
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    return sum(parameter.numel() for parameter in model.parameters())
