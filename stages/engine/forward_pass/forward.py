"""Forward passes over new tokens of many rows: what a pass computes, and the protocol of those that compute it.

Shapes: B rows, Q new tokens of the longest row, V vocabulary, W hidden width, N wanted positions of all rows.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

# What models call their cache; transformers 5.24 renamed the first to the second.
CACHE_NAMES = ("past_key_values", "cache", "cache_params", "state")
GROWTH = 16  # a cache grows by at least a sixteenth: little unused memory, few copies


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every new token of a row follows the one before it.

    >>> is_chain([-1, 0, 1]), is_chain([-1, 0, 0])
    (True, False)
    """
    return all(parent == token - 1 for token, parent in enumerate(parents))


def find_paths(parents: Sequence[int]) -> list[list[int]]:
    """Return the path of each new token of a row: its ancestors among the new tokens and itself. The parent of a token
    is the new token that it follows; -1 if it follows the cached tokens.

    >>> find_paths([-1, 0, 0, 2, -1])
    [[0], [0, 1], [0, 2], [0, 2, 3], [4]]
    """
    paths: list[list[int]] = []
    for token, parent in enumerate(parents):
        paths.append([*paths[parent], token] if parent >= 0 else [token])
    return paths


@dataclass(frozen=True)
class ForwardBatch:
    """What one pass computes.

    >>> batch = ForwardBatch(0, [[7, 8, 9], [6]], [2, 5], wanted=[1, 1], parents=[[-1, 0, 0], [-1]])
    >>> batch.counts, batch.slots, batch.positions, batch.wanted_tokens
    ([3, 1], [range(2, 5), range(5, 6)], [[2, 3, 3], [5]], [2, 3])
    """

    first: int  # the first row
    tokens: Sequence[Sequence[int]]  # new tokens per row; empty for a row without any, but not for all rows
    starts: Sequence[int]  # number of cached tokens per row
    wanted: Sequence[int]  # number of last new tokens per row for which logits are returned
    hidden: bool = False  # whether the last hidden states are returned too
    # Per row and new token the index, among the row's new tokens, of the one that it follows, which is smaller; -1 if
    # it follows the cached tokens. A token attends to cached tokens, its ancestors and itself. None: all are chains.
    parents: Sequence[Sequence[int]] | None = None

    @cached_property
    def counts(self) -> list[int]:
        """Number of new tokens per row."""
        return [len(new) for new in self.tokens]

    @cached_property
    def slots(self) -> list[range]:
        """Slots of the new tokens among those of their row."""
        return [range(start, start + len(new)) for start, new in zip(self.starts, self.tokens, strict=True)]

    @cached_property
    def paths(self) -> list[list[list[int]]] | None:
        """Per row and new token its path, see `find_paths`; None if every row is a chain."""
        if self.parents is None or all(map(is_chain, self.parents)):
            return None
        return [find_paths(parents) for parents in self.parents]

    @cached_property
    def positions(self) -> Sequence[Sequence[int]]:
        """Position of every new token in its text, per row."""
        if self.paths is None:
            return self.slots
        return [[start + len(path) - 1 for path in row] for start, row in zip(self.starts, self.paths, strict=True)]

    @cached_property
    def seen(self) -> int:
        """Number of slots of the longest row, after the pass."""
        return max(slots.stop for slots in self.slots)

    @cached_property
    def wanted_tokens(self) -> list[int]:
        """Indices, among the new tokens of all rows, of those whose logits are wanted."""
        indices: list[int] = []
        end = 0
        for count, number in zip(self.counts, self.wanted, strict=True):
            end += count
            indices.extend(range(end - number, end))
        return indices

    def take_row(self, row: int) -> "ForwardBatch":
        line = slice(row, row + 1)
        parents = None if self.parents is None else self.parents[line]
        tokens, starts, wanted = self.tokens[line], self.starts[line], self.wanted[line]
        return ForwardBatch(self.first + row, tokens, starts, wanted, self.hidden, parents)


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
    def capacity(self) -> int:
        """Number of tokens that a row of the cache can hold."""
        ...

    @property
    def reads_trees(self) -> bool:
        """Whether it is written to read rows that branch; `check_forward` checks that it does so rightly."""
        ...

    @property
    def cuts_rows(self) -> bool:
        """Whether the tensors of `read_cache` have tokens as their last dimension but one, and can be cut there."""
        ...

    def read_cache(self, row: int, length: int) -> list[Tensor]:
        """Return views of the keys and values of a row's first tokens; an empty list if the cache is empty."""
        ...

    def write_cache(self, row: int, kept: Sequence[Tensor], start: int = 0) -> None:
        """Write keys and values that `read_cache` returned to a reserved row, or a cut of them from `start` on."""
        ...

    def reserve(self, rows: int, capacity: int) -> None:
        """Grow the cache to that many rows of that many tokens; its content stays. Called before every pass."""
        ...

    def move(self, source: int, destination: int, length: int) -> None:
        """Put one row of so many cached tokens in the place of another. The source is undefined afterwards."""
        ...

    def keep(self, row: int, start: int, path: Sequence[int]) -> None:
        """Keep the new tokens of a path of the last pass, as if the row had read nothing else after `start` tokens. The
        path has ascending indices among its new tokens: each but the first follows the one before it.
        """
        ...

    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Compute the new tokens of a batch. Returns logits (N, V) of all wanted positions, rows concatenated, and
        their last hidden states (N, W), or the logits again without `hidden`.
        """
        ...

    def refresh(self, *, layers: bool = True) -> None:
        """Take over changed weights of the model, where its modules do not hold them; without `layers` those
        of the output layer.
        """
        return

    def share(self) -> "Forward":
        """Return another forward pass over the same weights, with rows of its own."""
        ...


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
