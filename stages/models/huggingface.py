"""The only file that imports `transformers`: loads and makes models and tokenizers, and defines their row cache.

Shapes: B rows, Q new tokens of the longest row, K keys, H key-value heads, E of a head.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError
from torch import Tensor

from store.errors import ModelError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from huggingface_hub import ModelCard, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging
from yaml import YAMLError

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


GROWTH = 16  # a cache grows by at least a sixteenth: little unused memory, few copies


class RowCache(Cache):
    """Preallocated keys and values of many rows; a row's length is a number, so that rollback copies nothing.

    The model writes through `update` to the slots that `place` set before the forward pass. One slot beyond the
    capacity, the trash slot, receives the padding.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []  # per layer, rows x H x places x E
        self._values: list[Tensor] = []
        self._capacity = 0
        self._rows = 0
        self._first = 0
        self._places_BQ: Tensor | None = None
        self._seen = 0

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow to that many rows of that many tokens, by at least a sixteenth; the content stays."""
        if rows <= self._rows and capacity <= self._capacity:
            return
        self._rows = max(rows, self._rows)
        if capacity > self._capacity:
            self._capacity = max(capacity, self._capacity + self._capacity // GROWTH)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._allocate(old)
                tensors[layer][: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._capacity + 1, like.shape[3])

    def place(self, first: int, places_BQ: Tensor, seen: int) -> None:
        """Set the slots of the next forward pass: it writes rows from `first` on and reads `seen` slots of each."""
        self._first, self._places_BQ, self._seen = first, places_BQ, seen

    def move(self, source: int, destination: int) -> None:
        """Copy one row over another."""
        for tensors in (self._keys, self._values):
            for layer in tensors:
                layer[destination] = layer[source]

    @property
    def bytes(self) -> int:
        """Size of all keys and values in bytes."""
        return sum(layer.numel() * layer.element_size() for layer in (*self._keys, *self._values))

    def read_row(self, place: int, length: int) -> list[Tensor]:
        """Return views of a row's first keys, by layer, then of its values; an empty list if the cache is empty."""
        return [layer[place, :, :length] for layer in (*self._keys, *self._values)]

    def write_row(self, place: int, kept: Sequence[Tensor]) -> None:
        """Write keys and values that `read_row` returned."""
        half = len(kept) // 2
        for layers, tensors in ((self._keys, kept[:half]), (self._values, kept[half:])):
            layers.extend(self._allocate(tokens[None]) for tokens in tensors[len(layers) :])
            for layer, tokens in zip(layers, tensors, strict=True):
                layer[place, :, : tokens.shape[1]] = tokens

    @property
    def trash(self) -> int:
        """The slot that receives the padding."""
        return self._capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values BHQE, return all BHKE. Called by the model's attention."""
        while layer_idx >= len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        return self._write(self._keys[layer_idx], key_states), self._write(self._values[layer_idx], value_states)

    def _write(self, kept: Tensor, new_BHQE: Tensor) -> Tensor:
        rows = slice(self._first, self._first + new_BHQE.shape[0])
        places_B1Q1 = self._places_BQ[:, None, :, None].expand_as(new_BHQE)  # type: ignore[index]
        kept[rows].scatter_(2, places_B1Q1, new_BHQE)
        return kept[rows, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of keys that the next pass reads. Models call it; our masks do not use it."""
        return self._seen


def pick_device(name: str) -> str:
    """Resolve the name of a device; `auto` is the first CUDA device if there is one, else the CPU.

    Raises:
        ModelError: torch cannot use the device.
    """
    chosen = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"the device {name!r} must be one that torch can use here: {reason}; try cpu") from error
    return chosen


def set_threads(number: int) -> None:
    """Set the number of CPU threads of one tensor operation."""
    torch.set_num_threads(number)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}


# `from_pretrained` replaces torch's initialisers for the whole process while it runs. Two at once, measured: both fail,
# and so does every later one.
_LOADING = Lock()


def load_causal_model(source: str, dtype: str, device: str) -> Any:
    """Load a causal language model from a hub name or folder to a device.

    Raises:
        ModelError: no model was found, or the hub cannot be reached.
    """
    _require_reachable(source)
    try:
        with _LOADING:
            model: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=DTYPES[dtype], attn_implementation="sdpa", trust_remote_code=False
            )
        return model.to(device)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(_load_error("model", source, error)) from error


def load_tokenizer(source: str) -> Any:
    """Load a fast tokenizer from a hub name or folder.

    Raises:
        ModelError: no tokenizer was found, or the hub cannot be reached.
    """
    _require_reachable(source)
    try:
        return AutoTokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare exceptions for broken files
        raise ModelError(_load_error("tokenizer", source, error)) from error


def _require_reachable(source: str) -> None:
    """Fail at once where the hub's own client would retry for half a minute.

    Raises:
        ModelError: the source is neither a folder nor cached, and the hub does not answer.
    """
    try:
        if Path(source).exists() or try_to_load_from_cache(source, "config.json") or getproxies():
            return
        socket.create_connection((urlsplit(ENDPOINT).hostname, 443), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ModelError(_load_error("model", source, error)) from error


def _load_error(what: str, source: str, error: Exception) -> str:
    kind = "the folder" if Path(source).is_dir() else "no folder of that name, and the hub"
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    if what == "tokenizer" and Path(source).is_dir() and not (Path(source) / "tokenizer.json").exists():
        reason = "it has no tokenizer.json"
    return (
        f"a {what} must load from {source!r}: {kind} did not give one ({reason}); "
        "name a folder that save_pretrained wrote, a hub model that this machine can reach, or builtin:NAME"
    )


def new_llama(seed: int, **shape: Any) -> LlamaForCausalLM:
    """Make a Llama with random weights; `shape` is passed to `LlamaConfig`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**shape))


def wrap_tokenizer(path: Path, **special_tokens: str) -> PreTrainedTokenizerFast:
    """Make a `transformers` tokenizer from a `tokenizers` JSON file and the names of its special tokens."""
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **special_tokens)


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face folder: bfloat16 safetensors, configuration, tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def raise_write_errors(folder: Path) -> Iterator[None]:
    """Raise every error of writing to a folder as an OSError; safetensors and tokenizers have their own error types.

    Raises:
        OSError: the folder could not be written.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{folder} could not be written: {error}") from error


def read_licence(source: str) -> str | None:
    """Read the licence from the model card of a folder or a cached hub model; None if there is none."""
    try:
        found = Path(source) / "README.md" if Path(source).is_dir() else try_to_load_from_cache(source, "README.md")
        text = Path(found).read_text(encoding="utf-8") if isinstance(found, str | Path) else ""
        licence = ModelCard(text).data.to_dict().get("license") if text.startswith("---") else None
    except (OSError, ValueError, YAMLError):  # no card, no metadata in it, or a name that is no repository's
        return None
    return str(licence) if licence else None
