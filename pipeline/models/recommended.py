"""The sampling values that a model's makers recommend, with which a server greets."""

import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.models.catalog import PULLABLE

FILE = "generation_config.json"
_KEYS = ("temperature", "top_p", "top_k")


def find_sampling(target: str) -> dict[str, float]:
    """Return recommended values by the names of the settings in `sampling`: those of a pulled model's card, or those of
    `generation_config.json` in a folder or on the hub. Empty if there are none, or sampling is not recommended.
    """
    if target in PULLABLE and not Path(target).is_dir():
        return dict(PULLABLE[target].sampling)
    try:
        found = json.loads(_find_file(target).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, Mapping) or not found.get("do_sample"):
        return {}
    return {key: found[key] for key in _KEYS if isinstance(found.get(key), int | float)}


def _find_file(target: str) -> Path:
    if Path(target).exists():
        return Path(target) / FILE
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(target, FILE))  # raises OSError or ValueError for what is no name of a model
