"""Attention masks of the models of `transformers` for queries and keys at any positions.

A model describes each of its masks (causal, sliding window, chunks) as a function of the position of a query and that
of a key; the library evaluates it for texts that all begin in the first column. `attend_by_position` evaluates the same
functions at the positions of ragged rows, so every pattern that a model has is right without a table of patterns.

New tokens of a row may be a tree: several continuations of its cached tokens at once. A token's position is then that
in its own continuation, and it attends to no token of another one.

Shapes: B rows, Q queries, K keys.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from stages.engine.checkpoints.deferred_imports import OF_TRANSFORMERS, defer_compiler, defer_imports

defer_compiler()
with defer_imports(*OF_TRANSFORMERS):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

LIBRARY = f"transformers {transformers.__version__}"


@dataclass(frozen=True)
class AttentionPositions:
    """Where the queries and keys of a pass are in their texts."""

    queries_BQ: Tensor  # position of each query
    keys_BK: Tensor  # position of each key; B may be 1
    # pairs that may attend to each other if the model's own mask allows it too; None: all pairs
    allowed_B1QK: Tensor | None = None


_POSITIONS: ContextVar[AttentionPositions | None] = ContextVar("attention_positions", default=None)


@contextmanager
def attend_by_position(positions: AttentionPositions) -> Iterator[None]:
    """Let the models that this thread calls make their masks for these positions."""
    token = _POSITIONS.set(positions)
    try:
        yield
    finally:
        _POSITIONS.reset(token)


def make_mask(
    positions: AttentionPositions, mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Evaluate a mask function of `transformers` (B, 1, Q, K); True where a query attends to a key.

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> positions = AttentionPositions(torch.tensor([[4], [2]]), torch.arange(5)[None])
    >>> make_mask(positions, sliding_window_causal_mask_function(2))[:, 0, 0].int()
    tensor([[0, 0, 0, 1, 1],
            [0, 1, 1, 0, 0]], dtype=torch.int32)
    """
    rows, device = len(positions.queries_BQ), positions.queries_BQ.device
    row_B111 = torch.arange(rows, device=device)[:, None, None, None]
    head_1111 = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    query_B1Q1, key_B11K = positions.queries_BQ[:, None, :, None], positions.keys_BK[:, None, None, :]
    mask_B1QK = mask_function(row_B111, head_1111, query_B1Q1, key_B11K)
    shape = rows, 1, query_B1Q1.shape[2], key_B11K.shape[3]
    mask_B1QK = mask_B1QK.expand(shape)
    return mask_B1QK if positions.allowed_B1QK is None else mask_B1QK & positions.allowed_B1QK


def mask_chains(mask_BQK: Tensor, queries_BQ1: Tensor, keys: range, window: int | None) -> None:
    """Hide later keys and those before the window from every query, in place; padding queries are 0. `keys` are the
    slots that are read, whose positions are the same; the window is as for `make_tree_mask`.
    """
    keys_K = torch.arange(keys.start, keys.stop, device=mask_BQK.device)
    mask_BQK.masked_fill_(keys_K > queries_BQ1, -torch.inf)
    if window is not None:
        mask_BQK.masked_fill_(keys_K <= queries_BQ1 - window, -torch.inf)
    # Padding attends to anything, not to nothing.
    mask_BQK.masked_fill_((queries_BQ1 < keys.start) & (keys_K == keys.start), 0)


def make_tree_mask(
    starts: Sequence[int],
    paths: Sequence[Sequence[Sequence[int]]],
    keys: range,
    device: torch.device,
    *,
    window: int | None = None,
    left: bool = False,
) -> Tensor:
    """Make a mask for rows of new tokens that are trees (B, Q, K): True for cached tokens, ancestors and the token.

    New token i of a row is in the slot after its cached tokens and i others. Padding attends to the first key, because
    a query that attends to nothing may give NaN. A token attends to `window` tokens of its text, its own included,
    None: to all. `left`: whether short rows are padded on the left.

    >>> make_tree_mask([2], [[[0], [0, 1], [0, 2]]], range(5), torch.device("cpu")).int()
    tensor([[[1, 1, 1, 0, 0],
             [1, 1, 1, 1, 0],
             [1, 1, 1, 0, 1]]], dtype=torch.int32)
    """
    width, size, seen = max(map(len, paths)), len(keys), window or keys.stop
    padding: list[list[Sequence[int]]] = [[()] * (width - len(row_paths)) for row_paths in paths]
    lines = [[*pad, *row_paths] if left else [*row_paths, *pad] for row_paths, pad in zip(paths, padding, strict=True)]
    shown: list[int] = []  # pairs as indices of the flat mask
    for row, (start, line) in enumerate(zip(starts, lines, strict=True)):
        for query, path in enumerate(line, row * width):
            first = query * size + start - keys.start
            shown.extend([first + token for token in path[-seen:]] if path else [query * size])
    starts_B11 = torch.tensor(starts, device=device)[:, None, None]
    keys_K = torch.arange(keys.start, keys.stop, device=device)
    mask_BQK = (keys_K < starts_B11).repeat(1, width, 1)
    if window is not None:
        depths_BQ = torch.tensor([[len(path) for path in line] for line in lines], device=device)
        mask_BQK &= keys_K >= starts_B11 + depths_BQ[..., None] - window
    mask_BQK.view(-1).index_fill_(0, torch.tensor(shown, device=device), True)
    return mask_BQK


def _register(implementation: str, *, additive: bool) -> None:
    """Let the masks of an attention implementation follow the positions where they are set."""
    make_library_mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation]

    def make(*args: Any, **kwargs: Any) -> Any:
        positions = _POSITIONS.get()
        if positions is None:
            return make_library_mask(*args, **kwargs)
        mask_B1QK = make_mask(positions, kwargs.get("mask_function", causal_mask_function))
        if not additive:
            return mask_B1QK
        dtype = kwargs.get("dtype", torch.float32)
        return torch.zeros(mask_B1QK.shape, dtype=dtype, device=mask_B1QK.device).masked_fill_(
            ~mask_B1QK, torch.finfo(dtype).min
        )

    ALL_MASK_ATTENTION_FUNCTIONS.register(implementation, make)


_register("sdpa", additive=False)
_register("eager", additive=True)
