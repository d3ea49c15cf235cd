"""Forward passes over new tokens of many rows: the protocol, and the one that uses the modules of `transformers`.

Shapes: B rows, Q new tokens of the longest row, K keys, V vocabulary, W hidden width, N wanted positions of all rows.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from stages.engine.forward_pass.attention_masks import (
    AttentionPositions,
    attend_by_position,
    make_tree_mask,
)
from stages.engine.forward_pass.forward_batch import ForwardBatch
from stages.engine.forward_pass.row_cache import RowCache

# What models call their cache; transformers 5.24 renamed the first to the second.
CACHE_NAMES = ("past_key_values", "cache", "cache_params", "state")


class Forward(Protocol):
    """Computes new tokens and keeps their keys and values in a cache of rows.

    A row is an index of the cache. The caller keeps the number of tokens per row, so that a rollback is a smaller
    number in the next call. New tokens take consecutive places after the cached ones, in a tree too.
    """

    @property
    def name(self) -> str:
        """A readable description of the implementation."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Size of the cached keys and values in bytes."""
        ...

    @property
    def capacity(self) -> int:
        """Number of tokens that a row of the cache can hold."""
        ...

    @property
    def reads_trees(self) -> bool:
        """Whether it is written to read rows that branch; `follows_trees` checks that it does so rightly."""
        ...

    @property
    def cuts_rows(self) -> bool:
        """Whether the tensors of `read_cache` have tokens as their last dimension but one, and can be cut there."""
        ...

    def read_cache(self, place: int, length: int) -> list[Tensor]:
        """Return views of the keys and values of a row's first tokens; an empty list if the cache is empty."""
        ...

    def write_cache(self, place: int, kept: Sequence[Tensor], start: int = 0) -> None:
        """Write keys and values that `read_cache` returned to a reserved row, or a cut of them from `start` on."""
        ...

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow the cache to that many rows of that many tokens; its content stays. Called before every pass."""
        ...

    def move(self, source: int, destination: int, length: int) -> None:
        """Put one row in the place of another. The content of the source is undefined afterwards.

        Args:
            source, destination: places of the two.
            length: number of cached tokens of the row that moves.
        """
        ...

    def keep(self, place: int, start: int, path: Sequence[int]) -> None:
        """Keep the new tokens of a path of the last pass, as if the row had read nothing else.

        Args:
            place: the row.
            start: number of its cached tokens before the pass.
            path: ascending indices among its new tokens: each but the first follows the one before it.
        """
        ...

    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Compute the new tokens of a batch.

        Returns:
            logits (N, V) of all wanted positions, rows concatenated, and their last hidden states (N, W), or the logits
            again without `hidden`.
        """
        ...

    def refresh(self) -> None:
        """Take over changed weights of the model."""
        ...

    def share(self) -> "Forward":
        """Return another forward pass over the same weights, with rows of its own."""
        ...


class ModuleForward(Forward):
    """Uses the modules of `transformers`, for any architecture. Rows of unequal length are padded on the left.

    Args:
        model: a Hugging Face causal language model whose attention is `sdpa` or `eager`.
    """

    name = "modules of transformers"
    reads_trees = True
    cuts_rows = True

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, RowCache()
        self._cache_name = find_cache_name(model) or CACHE_NAMES[0]

    @property
    @override
    def cache_bytes(self) -> int:
        return self._cache.bytes

    @property
    @override
    def capacity(self) -> int:
        return self._cache.trash

    @override
    def read_cache(self, place: int, length: int) -> list[Tensor]:
        return self._cache.read_row(place, length)

    @override
    def write_cache(self, place: int, kept: Sequence[Tensor], start: int = 0) -> None:
        self._cache.write_row(place, kept, start)

    @override
    def reserve(self, rows: int, capacity: int) -> None:
        self._cache.reserve(rows, capacity)

    @override
    def move(self, source: int, destination: int, length: int) -> None:
        self._cache.move(source, destination, length)

    @override
    def keep(self, place: int, start: int, path: Sequence[int]) -> None:
        self._cache.keep(place, start, path)

    @override
    def refresh(self) -> None:
        """Do nothing: the modules hold the weights."""

    @override
    def share(self) -> "ModuleForward":
        return ModuleForward(self._model)

    @override
    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        width, trash, device = max(batch.counts), self._cache.trash, self._model.device
        # Rows are aligned on the right; the padding on the left is written to the trash slot.
        ids = [[0] * (width - len(new)) + list(new) for new in batch.tokens]
        slots = [[trash] * (width - len(own)) + list(own) for own in batch.slots]
        ids_BQ, slots_BQ = torch.tensor([ids, slots], device=device)
        self._cache.place(batch.first, slots_BQ, batch.seen)
        if batch.paths is None:
            keys_1K = torch.arange(batch.seen, device=device)[None]
            positions = AttentionPositions(slots_BQ.where(slots_BQ != trash, 0), keys_1K)
        else:
            positions = _place_trees(batch, batch.paths, device)
        with attend_by_position(positions), record_hidden(self._model) as states:
            output = self._model(
                input_ids=ids_BQ,
                # No padding among the keys; some models compute position biases from it.
                attention_mask=slots_BQ.new_ones(len(ids), batch.seen),
                position_ids=positions.queries_BQ,
                use_cache=True,
                logits_to_keep=max(1, *batch.wanted),
                **{self._cache_name: self._cache},
            )
        logits_NV = _take_last(output.logits, batch.wanted)
        return logits_NV, _take_last(states[-1], batch.wanted) if batch.hidden else logits_NV


def _place_trees(
    batch: ForwardBatch, paths: Sequence[Sequence[Sequence[int]]], device: torch.device
) -> AttentionPositions:
    """Return the positions of rows whose new tokens are trees with these paths, padded on the left."""
    width = max(batch.counts)
    queries = [[*[0] * (width - len(own)), *own] for own in batch.positions]
    keys = [
        [*range(start), *own, *range(start + len(own), batch.seen)]
        for start, own in zip(batch.starts, batch.positions, strict=True)
    ]
    allowed_BQK = make_tree_mask(batch.starts, paths, range(batch.seen), device, left=True)
    return AttentionPositions(
        torch.tensor(queries, device=device), torch.tensor(keys, device=device), allowed_BQK[:, None]
    )


def find_cache_name(model: Any) -> str | None:
    """Return the name under which a model takes its cache; None if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


@contextmanager
def record_hidden(model: Any) -> Iterator[list[Tensor]]:
    """Yield a list that receives the last hidden states (B, Q, W) of every pass: the inputs of the output layer.

    The model's own list of hidden states has other shapes in some architectures.
    """
    states: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    try:
        yield states
    finally:
        hook.remove()


def _take_last(values_BQX: Tensor, wanted: Sequence[int]) -> Tensor:
    """Concatenate the last `wanted[b]` positions of each row."""
    length = values_BQX.shape[1]
    return torch.cat([row_QX[length - number :] for row_QX, number in zip(values_BQX, wanted, strict=True)])
