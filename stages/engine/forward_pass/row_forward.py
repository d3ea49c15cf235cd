"""The slowest forward pass, for models whose state no row cache can hold: every row by itself.

Each row has the cache that the model makes for itself: keys and values, states of convolutions and recurrences,
whatever there is. Such a state cannot be rolled back by a length. A copy of it is kept every few tokens; after a
rollback the copy is taken, and the tokens since then are computed again together with the new ones, in one pass.
"""

import copy
import inspect
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from typing_extensions import override

from stages.engine.forward_pass.forward import Forward, ForwardBatch, find_cache_name, record_hidden

COPY_EVERY = 16  # tokens between two copies; a draft is rarely longer, so a rollback computes few tokens again


def find_rope_switch(config: Any) -> int | None:
    """Return the length above which a model's rotary frequencies change (`longrope`); None if they never do.

    The model then computes the keys of a whole text with other frequencies, from its first token on.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (parameters, *parameters.values()) if isinstance(kind, dict)]
    lengths = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    return min((length for length in lengths if length), default=None)


@dataclass
class _Row:
    """The cached tokens of a row."""

    tokens: list[int] = field(default_factory=list)  # all of them
    cache: Any = None  # the model's own cache of them; None before the first
    # earlier states, as lengths and caches, in order of length
    copies: list[tuple[int, Any]] = field(default_factory=list)

    def roll_back(self, length: int) -> list[int]:
        """Return to the last copy of at most this length; return the tokens to compute again."""
        if length == len(self.tokens):
            return []
        if length == 0:
            self.tokens, self.cache, self.copies = [], None, []
            return []
        if _has_keys_only(self.cache):
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
            self.tokens = self.tokens[:length]
            return []
        self.copies = [(copied, cache) for copied, cache in self.copies if copied <= length]
        copied, cache = self.copies[-1] if self.copies else (0, None)
        again, self.tokens, self.cache = self.tokens[copied:length], self.tokens[:copied], copy.deepcopy(cache)
        return again

    def keep_copy(self) -> None:
        """Copy the state if the last copy is old. The last two copies stay. Keys and values need no copy."""
        if self.cache is None or _has_keys_only(self.cache):
            return
        if len(self.tokens) - (self.copies[-1][0] if self.copies else 0) >= COPY_EVERY:
            self.copies = [*self.copies[-1:], (len(self.tokens), copy.deepcopy(self.cache))]


class Reading(Enum):
    """How a model continues a text that it has a cache of."""

    CHUNKED = "row by row"
    STEPWISE = "row by row and token by token"  # it reads several tokens from the beginning of a text only
    UNCACHED = "row by row, each pass from the beginning of the text"  # its cache cannot be relied on, or it has none


class RowForward(Forward):
    """Computes one row after the other, each with the cache that the model makes for itself."""

    reads_trees = False  # a state has one continuation
    cuts_rows = False  # nor can it be cut

    def __init__(self, model: Any, reading: Reading = Reading.CHUNKED) -> None:
        self._model, self._reading = model, reading
        self._rows: list[_Row] = []
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = find_cache_name(model)
        self._takes_positions, self._keeps_last = "position_ids" in parameters, "logits_to_keep" in parameters

    @property
    @override
    def name(self) -> str:
        return f"modules of transformers, {self._reading.value}"

    @override
    def share(self) -> "RowForward":
        return RowForward(self._model, self._reading)

    @property
    @override
    def capacity(self) -> int:
        return max((len(row.tokens) for row in self._rows), default=0)

    @override
    def read_cache(self, index: int, length: int) -> list[Tensor]:
        """Return one tensor, the bytes of the row's tokens and states: they are lists of objects of `transformers`."""
        row, file = self._rows[index], io.BytesIO()
        torch.save({"tokens": row.tokens, "cache": row.cache, "copies": row.copies}, file)
        return [torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)]

    @override
    def write_cache(self, index: int, kept: Sequence[Tensor], start: int = 0) -> None:
        file = io.BytesIO(kept[0].cpu().numpy().tobytes())
        with torch.serialization.safe_globals(_cache_classes(self._model)):  # no other class of a checkpoint is loaded
            saved = torch.load(file, weights_only=True, map_location=self._model.device)
        self._rows[index] = _Row(saved["tokens"], saved["cache"], saved["copies"])

    @override
    def reserve(self, rows: int, capacity: int) -> None:
        self._rows.extend(_Row() for _ in range(rows - len(self._rows)))

    @override
    def move(self, source: int, destination: int, length: int) -> None:
        if source != destination:
            self._rows[destination], self._rows[source] = self._rows[source], _Row()

    @override
    def keep(self, index: int, start: int, path: Sequence[int]) -> None:
        """Do nothing: the path of a chain is its first tokens, and the next pass rolls back."""
        if list(path) != list(range(len(path))):
            raise ValueError(f"{self.name} reads chains, whose paths are their first tokens; got {list(path)}")

    @override
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if batch.paths is not None:
            raise ValueError(f"{self.name} reads chains, not trees; got the parents {batch.parents}")
        outputs = [
            self._read(self._rows[row], start, list(new), number, hidden=batch.hidden)
            for row, (new, start, number) in enumerate(
                zip(batch.tokens, batch.starts, batch.wanted, strict=True), batch.first
            )
            if new
        ]
        logits_NV, hidden_NW = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        return logits_NV, hidden_NW

    def _read(self, row: _Row, start: int, new: list[int], wanted: int, *, hidden: bool) -> tuple[Tensor, Tensor]:
        """Compute new tokens of one row from its place `start` on; return the last `wanted` outputs."""
        if self._reading is Reading.UNCACHED:
            row.tokens = row.tokens[:start]
        switch = find_rope_switch(self._model.config.get_text_config())
        if switch is not None and start <= switch < len(row.tokens):  # its keys have the frequencies of longer texts
            again, row.tokens, row.cache = row.tokens[:start], [], None
        else:
            again = row.roll_back(start)
        if len(again) >= COPY_EVERY:
            self._compute(row, again, 1, hidden=False)
            again = []
        if not again:
            row.keep_copy()
        logits_QV, states_QW = self._compute(row, [*again, *new], wanted, hidden=hidden)
        return logits_QV[len(logits_QV) - wanted :], states_QW[len(states_QW) - wanted :]

    def _compute(self, row: _Row, tokens: list[int], wanted: int, *, hidden: bool) -> tuple[Tensor, Tensor]:
        """Compute tokens in as few passes as the model allows; return the outputs of the last `wanted`, or of more."""
        switch = find_rope_switch(self._model.config.get_text_config())
        below = len(tokens) if switch is None else min(len(tokens), max(0, switch - len(row.tokens)))
        step = 1 if self._reading is Reading.STEPWISE and row.cache is not None else len(tokens)
        parts = [tokens[start : min(start + step, below)] for start in range(0, below, step)]
        outputs = [self._pass(row, part, wanted, hidden=hidden) for part in parts]
        if above := tokens[below:]:
            if switch is not None and len(row.tokens) <= switch:
                row.cache = None  # the first token above is computed with other frequencies, and so are all before it
            outputs.append(self._pass(row, above, wanted, hidden=hidden))
        if len(outputs) == 1:
            return outputs[0]
        logits, states = zip(*outputs, strict=True)
        return torch.cat(logits), torch.cat(states)

    def _pass(self, row: _Row, new: list[int], wanted: int, *, hidden: bool) -> tuple[Tensor, Tensor]:
        """Compute new tokens in one pass, with the cached ones if there is no cache; return outputs as `_compute`."""
        begin = 0 if row.cache is None else len(row.tokens)
        row.tokens = [*row.tokens, *new]
        arguments: dict[str, Any] = {"use_cache": False}
        if self._reading is not Reading.UNCACHED and self._cache_name is not None:
            arguments |= {"use_cache": True, self._cache_name: row.cache}
        if self._takes_positions:  # some models take the length of another layer's cache
            arguments["position_ids"] = torch.arange(begin, len(row.tokens), device=self._model.device)[None]
        count = max(1, min(wanted, len(new)))
        if self._keeps_last:
            arguments["logits_to_keep"] = count
        with record_hidden(self._model) as states:
            output = self._model(input_ids=torch.tensor([row.tokens[begin:]], device=self._model.device), **arguments)
        if arguments["use_cache"]:
            row.cache = output[self._cache_name]
        logits_QV: Tensor = output.logits[0, -count:]
        return logits_QV, states[-1][0, -count:] if hidden else logits_QV


def _has_keys_only(cache: Any) -> bool:
    """Whether a cache has nothing but keys and values of all tokens, so that it can be cut."""
    layers: list[Any] = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer) is cache_utils.DynamicLayer for layer in layers)


def _cache_classes(model: Any) -> list[Any]:
    """Return the classes of which the caches of a model are made: those of the library, and of the model's module."""
    members = vars(sys.modules[type(model).__module__]).values()
    roots = cache_utils.Cache, cache_utils.CacheLayerMixin, cache_utils.LinearAttentionCacheLayerMixin
    dummy = getattr(cache_utils, "DummyLayer", None)  # transformers 5.19 has none
    classes: list[Any] = [dummy] if dummy else []
    classes += [made for made in members if isinstance(made, type) and made.__name__.endswith("Cache")]
    waiting: list[Any] = list(roots)
    while waiting:
        made = waiting.pop()
        classes.append(made)
        waiting += made.__subclasses__()
    return classes
