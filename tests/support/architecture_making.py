"""Tiny random checkpoints of the architectures of `transformers`: configuration, weights, tokenizer."""

import math
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizer_making import MERGES, byte_level
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
warnings.filterwarnings("ignore", module="transformers")

END = "<|endoftext|>"  # the name that the tokenizers of Qwen add where it is missing
VOCABULARY_SIZE = 256 + len(MERGES) + 1
BASE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GAIN = 1.7  # of weights in standard deviations of 1/sqrt(inputs): greedy text varies


@dataclass(frozen=True)
class Architecture:
    """One line of the table."""

    name: str  # model type, and in brackets what differs from another line of the same type
    models: str  # examples of real models
    # configuration of the tiny checkpoint, over `BASE`; None removes a setting of `BASE`
    settings: Mapping[str, Any] = field(default_factory=dict)
    drafts: bool = False  # whether it is also tested as a drafter that learns
    seed: int = 0  # of the weights; changed where two logits of a greedy text are too close

    @property
    def model_type(self) -> str:
        return self.name.partition(" ")[0]


def alternate(*types: str, layers: int = 2) -> list[str]:
    """The types of so many layers, in turn."""
    return [types[layer % len(types)] for layer in range(layers)]


@cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, a few merges, and an end of text."""
    tokenizer = byte_level(MERGES, (END,))
    tokenizer.eos_token = END
    return tokenizer


def make_model(architecture: Architecture) -> Any:
    """A model in float32 whose weights are a function of the line alone."""
    settings = {**BASE, **architecture.settings}
    kept = {key: value for key, value in settings.items() if value is not None or key not in architecture.settings}
    kept |= {key: value for key, value in architecture.settings.items() if value is None and key not in BASE}
    torch.manual_seed(architecture.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture.model_type, **kept)).float().eval()
    _draw_weights(model, zlib.crc32(architecture.name.encode()) + architecture.seed)
    model.generation_config.eos_token_id = VOCABULARY_SIZE - 1
    model.generation_config.pad_token_id = VOCABULARY_SIZE - 1
    return model


@torch.no_grad()
def _draw_weights(model: nn.Module, seed: int) -> None:
    """Draw matrices, embeddings and biases; norms and the parameters of recurrences stay as the model makes them."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each id
            table.copy_((torch.arange(len(table))[:, None] + torch.arange(table.shape[1])) % 4)
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.fill_(1.0)  # some models clamp small time steps in passes over several tokens only
        scale = _scale_of(name, weight, is_embedding=id(weight) in embeddings)
        if scale:
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def _scale_of(name: str, weight: Tensor, *, is_embedding: bool) -> float:
    """The standard deviation of a weight; 0 for one that stays."""
    if is_embedding:
        return 1.0
    kind = name.rpartition(".")[2]
    if weight.ndim == 1:
        return 0.1 if kind == "bias" else 0.0
    if kind.startswith(("time_", "A_log", "D", "dt_", "layer_scalar")):
        return 0.0
    return GAIN / math.sqrt(weight[0].numel() if weight.ndim == 2 or "conv" in name else weight.shape[-1])


def save_checkpoint(architecture: Architecture, folder: Path) -> None:
    """Write a Hugging Face folder in float32."""
    make_model(architecture).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
