"""How a language model reads new tokens of many rows: the protocol, and the way of `transformers`' own modules.

Shapes: B rows, Q new tokens of the longest row, K keys, V vocabulary, W hidden width, N wanted positions of all rows.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stages.huggingface import RowCache


class Forward(Protocol):
    """Reads tokens and keeps their keys and values. A row is a place; how many tokens it has read is the caller's to
    know, so that taking tokens back is a smaller number in the next call.
    """

    @property
    def name(self) -> str:
        """How it computes, for people."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values that are kept."""
        ...

    @property
    def capacity(self) -> int:
        """Tokens that there is room for in a row."""
        ...

    def kept(self, place: int, length: int) -> list[Tensor]:
        """Keys and values of a row's first tokens; nothing if nothing was ever read. Views: copy what shall last."""
        ...

    def put(self, place: int, kept: Sequence[Tensor]) -> None:
        """Take back what `kept` gave, into a row that room was made for."""
        ...

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for that many rows of that many tokens; what was read stays. Called before every pass."""
        ...

    def move(self, source: int, destination: int) -> None:
        """Copy one row over another."""
        ...

    def __call__(
        self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int], wanted: Sequence[int], *, hidden: bool
    ) -> tuple[Tensor, Tensor]:
        """Read new tokens of the rows from `first` on.

        Args:
            first: the first row.
            tokens: new tokens per row; none for a row that rests.
            starts: how many tokens each row has read before.
            wanted: at how many of a row's last new tokens the logits are wanted; at most all of them.
            hidden: whether the last hidden states are wanted too.

        Returns:
            logits (N, V) of all wanted positions, rows joined, and the hidden states behind them (N, W), or the logits
            again.
        """
        ...

    def refresh(self) -> None:
        """The model's weights have changed."""
        ...


class ModuleForward:
    """By the model's own modules, any architecture. Rows of unequal length are padded at their beginnings.

    Args:
        model: a Hugging Face causal language model whose attention takes a boolean mask (`sdpa`).
    """

    name = "modules of transformers"

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, RowCache()

    @property
    def cache_bytes(self) -> int:
        """See `Forward`."""
        return self._cache.bytes

    @property
    def capacity(self) -> int:
        """See `Forward`."""
        return self._cache.trash

    def kept(self, place: int, length: int) -> list[Tensor]:
        """See `Forward`."""
        return self._cache.kept(place, length)

    def put(self, place: int, kept: Sequence[Tensor]) -> None:
        """See `Forward`."""
        self._cache.put(place, kept)

    def reserve(self, rows: int, capacity: int) -> None:
        """See `Forward`."""
        self._cache.reserve(rows, capacity)

    def move(self, source: int, destination: int) -> None:
        """See `Forward`."""
        self._cache.move(source, destination)

    def refresh(self) -> None:
        """See `Forward`. The modules are the weights."""

    def __call__(
        self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int], wanted: Sequence[int], *, hidden: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Forward`."""
        width, trash = max(map(len, tokens)), self._cache.trash
        # Rows are aligned at their ends; what pads their beginnings is written to the trash.
        ids = [[0] * (width - len(new)) + list(new) for new in tokens]
        places = [
            [trash] * (width - len(new)) + list(range(start, start + len(new)))
            for start, new in zip(starts, tokens, strict=True)
        ]
        ids_BQ, places_BQ = torch.tensor([ids, places], device=self._model.device)
        seen = max(start + len(new) for start, new in zip(starts, tokens, strict=True))
        self._cache.place(first, places_BQ, seen)
        positions_BQ = places_BQ.where(places_BQ != trash, 0)
        mask_B1QK = (torch.arange(seen, device=places_BQ.device) <= positions_BQ[..., None])[:, None]
        output = self._model(
            input_ids=ids_BQ,
            attention_mask=mask_B1QK,
            position_ids=positions_BQ,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=max(1, max(wanted)),
            output_hidden_states=hidden,
        )
        logits_NV = _last(output.logits, wanted)
        return logits_NV, _last(output.hidden_states[-1], wanted) if hidden else logits_NV


def _last(values_BQX: Tensor, wanted: Sequence[int]) -> Tensor:
    """The last `wanted[b]` positions of each row, joined."""
    length = values_BQX.shape[1]
    return torch.cat([row_QX[length - number :] for row_QX, number in zip(values_BQX, wanted, strict=True)])
