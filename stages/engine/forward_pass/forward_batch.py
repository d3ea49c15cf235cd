"""The new tokens of one pass: chains or trees that follow the cached tokens of consecutive rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every new token of a row follows the one before it.

    >>> is_chain([-1, 0, 1]), is_chain([-1, 0, 0])
    (True, False)
    """
    return all(parent == token - 1 for token, parent in enumerate(parents))


def find_paths(parents: Sequence[int]) -> list[list[int]]:
    """Return the path of each new token of a row: its ancestors among the new tokens and itself.

    >>> find_paths([-1, 0, 0, 2, -1])
    [[0], [0, 1], [0, 2], [0, 2, 3], [4]]

    Args:
        parents: per new token the new token that it follows; -1 if it follows the cached tokens.
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
        """Return one of the rows as a batch."""
        line = slice(row, row + 1)
        parents = None if self.parents is None else self.parents[line]
        tokens, starts, wanted = self.tokens[line], self.starts[line], self.wanted[line]
        return ForwardBatch(self.first + row, tokens, starts, wanted, self.hidden, parents)
