"""Tables of soft targets: the target's likeliest tokens, mapped to the drafter's pieces.

The probability of every token is added to its first piece. So at the beginning of a token the target's distribution is
a distribution over the drafter's pieces and needs no alignment. Within a token of several pieces the following
distributions are conditionals. The probability of tokens that were not stored belongs to the rest.

Everything here is computed where training computes, in numpy: whole arrays at a time, since the interpreter is shared
with the thread that decodes.

Shapes: N soft targets, T top pieces, K stored tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stages.contract.blocks import Numbers, TopTokens


class SoftTargetTable(NamedTuple):
    """Soft targets as arrays, one line for each: the target's distribution at a piece of the text, reduced to the
    likeliest pieces. Padding has id 0 and probability 0.
    """

    positions_N: Numbers  # index of the piece in the row's pieces
    depths_N: Numbers  # 0 where a token begins, else the number of pieces of the token that are already given
    ids_NT: Numbers  # the likeliest next pieces
    valid_NT: Numbers  # False at padding
    group_NT: Numbers  # target probability of each, all tokens below it summed (conditional at depth > 0)
    direct_NT: Numbers  # of that, the part of the token that is exactly this one piece (0 at depth > 0)
    rest_N: Numbers  # the remaining probability: other pieces at depth 0, the end of the token at depth > 0


def join_tables(tables: Sequence[SoftTargetTable]) -> SoftTargetTable:
    """Concatenate tables, padded to the widest."""
    width = max(table.ids_NT.shape[1] for table in tables)
    return SoftTargetTable(
        *(np.concatenate([_pad(part, width) for part in parts]) for parts in zip(*tables, strict=True))
    )


def _pad(values: Numbers, width: int) -> Numbers:
    return values if values.ndim == 1 else np.pad(values, ((0, 0), (0, width - values.shape[1])))


def tabulate(tokens: TopTokens) -> SoftTargetTable:
    """Compute the soft targets of a text: the probabilities of tokens summed per next piece, at the first piece of each
    token, then after each of its pieces over the tokens that begin alike.
    """
    levels = tokens.levels.astype(np.int64)
    ends = levels.cumsum()
    owner_N = np.repeat(np.arange(len(levels)), levels)
    depth_N = np.arange(len(owner_N)) - (ends - levels)[owner_N]
    length_NK, probs_NK = tokens.lengths[owner_N], tokens.probs[owner_N].astype(np.float64)
    next_NK = _next_pieces(tokens, owner_N, depth_N)
    alike_NK = _begin_alike(next_NK, tokens.own[owner_N], depth_N)
    mass_NK = np.where(alike_NK, probs_NK, 0.0)
    total_N = mass_NK.sum(1)
    mass_NK /= np.where((depth_N > 0) & (total_N > 0), total_N, 1.0)[:, None]
    direct_NK = np.where((length_NK == 1) & (depth_N == 0)[:, None], mass_NK, 0.0)
    ids_NT, valid_NT, group_NT, direct_NT = _sum_by_piece(np.where(alike_NK, next_NK, -1), mass_NK, direct_NK)
    rest_N = (1 - group_NT.sum(1)).clip(min=0)
    positions_N = tokens.positions[owner_N] + depth_N
    return SoftTargetTable(positions_N, depth_N, ids_NT, valid_NT, group_NT, direct_NT, rest_N)


def _next_pieces(tokens: TopTokens, owner_N: Numbers, depth_N: Numbers) -> Numbers:
    """Return the piece of each stored token at each depth; -1 where the token has none (N, K)."""
    lengths = tokens.lengths.astype(np.int64)
    starts = lengths.ravel().cumsum().reshape(lengths.shape) - lengths
    has_NK = lengths[owner_N] > depth_N[:, None]
    places_NK = np.where(has_NK, starts[owner_N] + depth_N[:, None], 0)
    pieces = tokens.pieces if len(tokens.pieces) else np.zeros(1, np.int64)
    return np.where(has_NK, pieces[places_NK], -1).astype(np.int64)


def _begin_alike(next_NK: Numbers, own_N: Numbers, depth_N: Numbers) -> Numbers:
    """Return which tokens have the pieces of the token itself before each depth (N, K)."""
    own_piece_N1 = np.take_along_axis(next_NK, own_N[:, None].astype(np.int64), 1)
    same_NK, alike_NK = next_NK == own_piece_N1, np.ones(next_NK.shape, np.bool_)
    for depth in range(1, int(depth_N.max(initial=0)) + 1):
        (lines,) = (depth_N == depth).nonzero()
        alike_NK[lines] = alike_NK[lines - 1] & same_NK[lines - 1]
    return alike_NK


def _sum_by_piece(next_NK: Numbers, mass_NK: Numbers, direct_NK: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return the distinct pieces of each line, which of them are no padding, and the sums of both masses (N, T)."""
    order_NK = next_NK.argsort(1, kind="stable")
    sorted_NK = np.take_along_axis(next_NK, order_NK, 1)
    begins_NK = sorted_NK >= 0
    begins_NK[:, 1:] &= sorted_NK[:, 1:] != sorted_NK[:, :-1]
    group_NK = begins_NK.cumsum(1) - 1  # -1 for tokens without a next piece, which come first
    width = max(1, int(group_NK.max(initial=0)) + 1)
    kept_NK = group_NK >= 0
    places = (np.arange(len(next_NK))[:, None] * width + group_NK)[kept_NK]

    def sums(values_NK: Numbers) -> Numbers:
        kept = np.take_along_axis(values_NK, order_NK, 1)[kept_NK]
        return np.bincount(places, kept, len(next_NK) * width).reshape(-1, width)

    ids_NT = np.zeros(len(next_NK) * width, np.int64)
    ids_NT[places] = sorted_NK[kept_NK]
    counts_N = begins_NK.sum(1)
    return ids_NT.reshape(-1, width), np.arange(width) < counts_N[:, None], sums(mass_NK), sums(direct_NK)
