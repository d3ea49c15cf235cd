"""Loads and makes models and tokenizers of `transformers`."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError

from store.errors import ModelError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from huggingface_hub import ModelCard, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging
from yaml import YAMLError

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


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
