"""Refuse a checkpoint whose configuration needs far more than its files hold, before a model is built of it.

Building takes time and memory by the configuration alone: a million layers, or a vocabulary of a billion tokens, keep
a process busy for hours or use up its memory, however small the files are.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from store.errors import ModelError

HEADER_BYTES = 100 << 20  # of a safetensors file; its own library allows as many
# More layers than these must be among the tensors one by one. Experts may be rows of one tensor, or named by the
# configuration of a model that has none, so more of them are built without a question.
FEW_MODULES, FEW_EXPERTS = 1000, 100_000
# Weights of one bit are 8 to a byte; twice as many are allowed for those that a file holds once and a model twice.
WEIGHTS_PER_BYTE = 16
_REPEATED = ("layer", "layers", "blocks", "experts")  # how keys end that count modules, such as n_layer


def require_plausible_sizes(source: str, config: Mapping[str, Any], build: Callable[[], Any]) -> None:
    """Compare what a configuration needs with the safetensors files next to it; without any, do nothing.

    Args:
        build: builds the model by it; called on torch's meta device, where tensors take no memory.

    Raises:
        ModelError: there are more layers or experts than tensors, or far more weights than the files can hold.
    """
    config_file = find_file(source, "config.json")
    tensors, size = measure_files(config_file.parent if config_file else Path(source))
    if not size:
        return
    for name, count in _count_modules(config):
        if count > max(FEW_EXPERTS if name.endswith("experts") else FEW_MODULES, tensors):
            raise ModelError(
                f"{source!r} must have a tensor for each of its modules, but its configuration has {name} = {count:,} "
                f"and its files hold {tensors:,} tensors; fetch the model again"
            )
    try:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in build().parameters())
    except Exception:  # the loader explains what is wrong
        return
    if weights > WEIGHTS_PER_BYTE * size:
        raise ModelError(
            f"{source!r} must have files that hold its weights, but its configuration needs {weights:,} weights "
            f"({weights * 4 / 2**30:,.0f} GiB in float32) and its files have {size:,} bytes; fetch the model again"
        )


def measure_files(folder: Path) -> tuple[int, int]:
    """Return the number of tensors and of bytes in the safetensors files of a folder; files that are none count 0."""
    tensors = size = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length <= HEADER_BYTES else {}
            tensors += len(header.keys() - {"__metadata__"})
            size += path.stat().st_size
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return tensors, size


def _count_modules(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the numbers of repeated modules in a configuration and its parts, by key."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _count_modules(value)
        elif isinstance(value, int) and name.endswith(_REPEATED):
            yield name, value


def find_file(source: str, name: str) -> Path | None:
    """Return the path of a file in a folder, where it need not be, or of a cached file of a hub model."""
    if Path(source).is_dir():
        return Path(source) / name
    try:
        cached = try_to_load_from_cache(source, name)
    except ValueError:  # no name of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None
