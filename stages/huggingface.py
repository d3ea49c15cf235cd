"""The only file that imports `transformers`: loading, making and saving models and tokenizers."""

import os
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from transformers import (  # noqa: E402  (the variables above must be set first)
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging  # noqa: E402

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


def new_llama(seed: int, **shape: Any) -> LlamaForCausalLM:
    """A Llama with random weights. `shape` goes to `LlamaConfig`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**shape))


def wrap_tokenizer(path: Path, **special_tokens: str) -> PreTrainedTokenizerFast:
    """A `transformers` tokenizer from a `tokenizers` JSON file and the names of its special tokens."""
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **special_tokens)


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face folder: bfloat16 safetensors, configuration, tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


__all__ = ["AutoModelForCausalLM", "AutoTokenizer", "new_llama", "save", "wrap_tokenizer"]
