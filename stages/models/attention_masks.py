"""Attention masks of the models of `transformers` for queries and keys at any positions.

A model describes each of its masks (causal, sliding window, chunks) as a function of the position of a query and that
of a key; the library evaluates it for texts that all begin in the first column. `attend_by_position` evaluates the same
functions at the positions of ragged rows, so every pattern that a model has is right without a table of patterns.

Shapes: B rows, Q queries, K keys.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

LIBRARY = f"transformers {transformers.__version__}"


@dataclass(frozen=True)
class AttentionPositions:
    """Where the queries and keys of a pass are in their texts.

    Attributes:
        queries_BQ: position of each query.
        keys_BK: position of each key; B may be 1.
        allowed_B1QK: pairs that may attend to each other if the model's own mask allows it too; None: all pairs.
    """

    queries_BQ: Tensor
    keys_BK: Tensor
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
