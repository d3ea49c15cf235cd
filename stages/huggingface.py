"""The only file that imports `transformers`: loading, saving, and running models over rows of unequal length.

Shapes: B rows, Q new tokens of the longest row, K keys, H key-value heads, E of a head, V vocabulary, W hidden width.
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.blocks import Row
from store.errors import ModelError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


class RowCache(Cache):
    """Keys and values of many rows, preallocated; a row's length is a number, so that rollback copies nothing.

    The model writes through `update` at the places that `place` set before the forward pass. One more place than the
    capacity takes what padding writes.
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
        """Make room for that many rows of that many tokens, doubling what is there; kept content stays."""
        if rows <= self._rows and capacity <= self._capacity:
            return
        self._rows = max(rows, self._rows)
        self._capacity = max(capacity, 2 * self._capacity if capacity > self._capacity else self._capacity)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._allocate(old)
                tensors[layer][: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._capacity + 1, like.shape[3])

    def place(self, first: int, places_BQ: Tensor, seen: int) -> None:
        """Where the next forward pass writes: rows from `first` on, at these places; it reads `seen` places."""
        self._first, self._places_BQ, self._seen = first, places_BQ, seen

    def move(self, source: int, destination: int) -> None:
        """Copy one row over another."""
        for tensors in (self._keys, self._values):
            for layer in tensors:
                layer[destination] = layer[source]

    @property
    def trash(self) -> int:
        """The place for what padding writes."""
        return self._capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: store BHQE, return BHKE."""
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
        """Keys that the next pass reads; models ask for it, our masks do not use it."""
        return self._seen


class LanguageModel:
    """A causal language model over rows of unequal length, with its own key-value cache.

    Args:
        model: any Hugging Face causal language model whose attention takes a boolean mask (`sdpa`).
        name: for messages.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model.eval(), name
        self.device: torch.device = next(model.parameters()).device
        self.vocabulary_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self.max_length: int = getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.layers: int = model.config.get_text_config().num_hidden_layers
        self._cache = RowCache()
        self._order: list[Row] = []
        self._lengths: dict[Row, int] = {}

    def admit(self, row: Row, tokens: Sequence[int]) -> None:
        """Take a row in and read all of its tokens but the last."""
        self._order.append(row)
        self._lengths[row] = 0
        self._cache.reserve(len(self._order), len(tokens) + row.room + 72)
        if len(tokens) > 1:
            self._forward(len(self._order) - 1, [row], [tokens[:-1]], keep=1, hidden=False)

    def release(self, row: Row) -> None:
        """Let a row go; the last row takes its place."""
        place = self._order.index(row)
        last = self._order.pop()
        if last is not row:
            self._cache.move(len(self._order), place)
            self._order[place] = last
        del self._lengths[row]

    def mask_without(self, allowed: Collection[int]) -> Tensor:
        """True for every output of the model that is not among the allowed ids (V,)."""
        forbidden_V = torch.ones(self.vocabulary_size, dtype=torch.bool, device=self.device)
        forbidden_V[torch.tensor(sorted(allowed), dtype=torch.long, device=self.device)] = False
        return forbidden_V

    def length(self, row: Row) -> int:
        """How many tokens of the row are in the cache."""
        return self._lengths[row]

    def roll_back(self, row: Row, length: int) -> None:
        """Forget a row's tokens behind the first `length`."""
        self._lengths[row] = min(length, self._lengths[row])

    def forward(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], keep: int, *, hidden: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Read new tokens of every admitted row, in order of admission.

        Args:
            rows: all admitted rows.
            tokens: new tokens per row; none for a row that rests.
            keep: at how many of the last positions the logits are wanted, at most the longest row's tokens.
            hidden: whether the last hidden states are wanted too.

        Returns:
            logits (B, keep, V), the last position of each row at the end, and the hidden states behind them
            (B, keep, W), or the logits again. What stands before a shorter row's first token is meaningless.
        """
        if list(rows) != self._order:
            raise ValueError("rows must be all admitted rows in the order of admission")
        return self._forward(0, rows, tokens, keep, hidden=hidden)

    @torch.inference_mode()
    def _forward(
        self, first: int, rows: Sequence[Row], tokens: Sequence[Sequence[int]], keep: int, *, hidden: bool
    ) -> tuple[Tensor, Tensor]:
        width = max(len(new) for new in tokens)
        lengths = [self._lengths[row] for row in rows]
        self._cache.reserve(len(self._order), max(map(sum, zip(lengths, map(len, tokens), strict=True))))
        # Rows are aligned at their ends; what pads their beginnings is written to the trash.
        ids = [[0] * (width - len(new)) + list(new) for new in tokens]
        places = [
            [self._cache.trash] * (width - len(new)) + list(range(start, start + len(new)))
            for start, new in zip(lengths, tokens, strict=True)
        ]
        ids_BQ, places_BQ = torch.tensor([ids, places], device=self.device)
        seen = max(start + len(new) for start, new in zip(lengths, tokens, strict=True))
        self._cache.place(first, places_BQ, seen)
        positions_BQ = places_BQ.where(places_BQ != self._cache.trash, 0)
        mask_B1QK = (torch.arange(seen, device=self.device) <= positions_BQ[..., None])[:, None]
        output = self.model(
            input_ids=ids_BQ,
            attention_mask=mask_B1QK,
            position_ids=positions_BQ,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
            output_hidden_states=hidden,
        )
        for row, new in zip(rows, tokens, strict=True):
            self._lengths[row] += len(new)
        last_hidden = output.hidden_states[-1][:, -keep:] if hidden else output.logits
        return output.logits, last_hidden

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a sequence by the model's generation settings; empty if it names none."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write a Hugging Face folder of the model as it now is."""
        self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def pick_device(name: str) -> str:
    """`auto` is the first CUDA device where there is one, else the CPU."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def set_threads(number: int) -> None:
    """Threads of one tensor operation."""
    torch.set_num_threads(number)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}


def load_model(source: str, dtype: str, device: str) -> LanguageModel:
    """Load a causal language model from a hub name or folder.

    Raises:
        ModelError: if there is none there, or the hub cannot be reached.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype], attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(_not_loaded("model", source, error)) from error
    return LanguageModel(model.to(device), source)


def load_tokenizer(source: str) -> Any:
    """Load a fast tokenizer from a hub name or folder.

    Raises:
        ModelError: if there is none there, or the hub cannot be reached.
    """
    try:
        return AutoTokenizer.from_pretrained(source, use_fast=True)
    except Exception as error:  # tokenizers raises bare exceptions for broken files
        raise ModelError(_not_loaded("tokenizer", source, error)) from error


def _not_loaded(what: str, source: str, error: Exception) -> str:
    kind = "the folder" if Path(source).is_dir() else "no folder of that name, and the hub"
    reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    return (
        f"a {what} must load from {source!r}: {kind} did not give one ({reason}); "
        "name a folder that save_pretrained wrote, a hub model that this machine can reach, or builtin:NAME"
    )


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
