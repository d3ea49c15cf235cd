"""Soft targets as tests make and compare them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from stages.contract.blocks import TopLogits, TopTokens
from stages.learn.examples.soft_targets import SoftTargetTable, tabulate


class SoftTarget(NamedTuple):
    """A line of a `SoftTargetTable`, without its padding."""

    position: int
    depth: int
    ids: tuple[int, ...]
    group: tuple[float, ...]
    direct: tuple[float, ...]
    rest: float


def read_table(table: SoftTargetTable) -> tuple[SoftTarget, ...]:
    """The soft targets of a table."""
    found = []
    for position, depth, ids, valid, group, direct, rest in zip(*table, strict=True):
        parts = (tuple(values[valid].tolist()) for values in (ids, group, direct))
        found.append(SoftTarget(int(position), int(depth), *parts, float(rest)))
    return tuple(found)


def compute_all(stored: TopTokens | TopLogits) -> tuple[SoftTarget, ...]:
    """The soft targets of an example or of a block, as training computes them."""
    return read_table(tabulate(stored.spell(stored) if isinstance(stored, TopLogits) else stored))


def store_tokens(*stored: tuple[int, Mapping[tuple[int, ...], float]]) -> TopTokens:
    """Tokens at these positions, as many at each: the pieces of each and its probability; the first is the own one."""
    positions, spelt = zip(*stored, strict=True)
    lengths = np.array([[len(pieces) for pieces in tokens] for tokens in spelt])
    pieces = np.array([piece for tokens in spelt for pieces in tokens for piece in pieces])
    probs = np.array([list(tokens.values()) for tokens in spelt], np.float32)
    return TopTokens(np.array(positions), lengths[:, 0], 0 * lengths[:, 0], probs, lengths, pieces)
