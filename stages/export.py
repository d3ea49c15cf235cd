"""A drafter as other engines read it: one plain Hugging Face folder, its adapter merged."""

from pathlib import Path

from stages.adapters import ADAPTER_FOLDER, merge_saved_adapter
from stages.huggingface import load_causal_model, load_tokenizer
from stages.saving import writing


def export_drafter(version: Path, into: Path, draft_length: int) -> int:
    """Write the drafter of a version's folder, which must have been checked, in the type that it was saved in.

    Args:
        version: what `LanguageModel.save` wrote.
        into: a folder; what is in it stays.
        draft_length: pieces of a draft that `transformers` shall draw, instead of its own 20.

    Returns:
        The number of parameters.

    Raises:
        ModelError: the folder holds no model or no tokenizer.
        OSError: it cannot be written.
    """
    model, tokenizer = load_causal_model(str(version), "auto", "cpu"), load_tokenizer(str(version))
    if (version / ADAPTER_FOLDER).is_dir():
        merge_saved_adapter(model, version / ADAPTER_FOLDER)
    model.generation_config.update(num_assistant_tokens=draft_length, num_assistant_tokens_schedule="constant")
    with writing(into):
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    return sum(parameter.numel() for parameter in model.parameters())


def licence_of(source: str) -> str | None:
    """The licence that a model's card names, for a folder or a hub model whose card is on this machine; else None."""
    from huggingface_hub import ModelCard, try_to_load_from_cache
    from yaml import YAMLError

    try:
        found = Path(source) / "README.md" if Path(source).is_dir() else try_to_load_from_cache(source, "README.md")
        text = Path(found).read_text(encoding="utf-8") if isinstance(found, str | Path) else ""
        licence = ModelCard(text).data.to_dict().get("license") if text.startswith("---") else None
    except (OSError, ValueError, YAMLError):  # no card, no metadata in it, or a name that is no repository's
        return None
    return str(licence) if licence else None
