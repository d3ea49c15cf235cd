"""Blocks of drafts along recorded texts: how many pieces are right, and what a block is worth at given costs.

At temperature 0 a draft's accepted pieces are those before its first wrong one. As long as a draft is right, its pieces
are the text's, so each piece's prediction after the text is all that must be known.

Shapes: P places, S places where tokens begin, K pieces of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.study.parallel_heads.fitting import FittedHead
from pipeline.study.parallel_heads.places import OFFSETS, Places
from stages.drafting.target_states import AGE_DECAY


@dataclass(frozen=True)
class Drafts:
    """The longest drafts of one way of drafting from every beginning of a token.

    Attributes:
        name: in the tables.
        right_SK: whether each piece is right if all before it are.
        passes: drafter passes that a draft of 1, 2, ... K pieces takes.
    """

    name: str
    right_SK: Tensor
    passes: tuple[int, ...]

    def count_accepted(self, length: int) -> Tensor:
        """Return the accepted pieces of drafts of a length (S,)."""
        return self.right_SK[:, :length].cumprod(1).sum(1)

    def share_right(self, offset: int) -> float:
        """Return how often the piece at an offset is right where all before it are; 0 where they never are."""
        reached_S = self.count_accepted(offset) == offset
        return float(self.right_SK[reached_S, offset].float().mean()) if bool(reached_S.any()) else 0.0


def draft_in_passes(name: str, places: Places, own: FittedHead, later: Sequence[FittedHead], passes: int) -> Drafts:
    """Draft one piece per pass, and with the last one of some passes as many more as there are heads for.

    Args:
        name: in the tables.
        places: all places of the texts.
        own: predicts the next piece.
        later: heads of the offsets 1, 2, ...
        passes: that are made at most; OFFSETS for a pass per piece.
    """
    heads = (own, *later)
    right_HP = [head.right(places) for head in heads[: OFFSETS - passes + 1]]
    (starts_S,) = places.first_P.nonzero(as_tuple=True)
    columns = []
    for offset in range(OFFSETS):
        moved = min(offset, passes - 1)
        inside_S = places.next_PK[starts_S, offset] >= 0
        at_S = torch.where(inside_S, starts_S + moved, starts_S)  # places of a text follow each other
        columns.append(right_HP[offset - moved][at_S] & inside_S)
    return Drafts(name, torch.stack(columns, 1), tuple(min(length, passes) for length in range(1, OFFSETS + 1)))


def draft_with_states(name: str, places: Places, own: FittedHead) -> Drafts:
    """Draft one piece per pass by a head that reads the target's state, which ages along the draft."""
    (starts_S,) = places.first_P.nonzero(as_tuple=True)
    columns = []
    for offset in range(OFFSETS):
        inside_S = places.next_PK[starts_S, offset] >= 0
        moved = places.take(torch.where(inside_S, starts_S + offset, starts_S))
        aged = replace(moved, states_PF=AGE_DECAY**offset * places.states_PF[starts_S])
        columns.append(own.right(aged) & inside_S)
    return Drafts(name, torch.stack(columns, 1), tuple(range(1, OFFSETS + 1)))


def tokens_per_block(drafts: Drafts, places: Places, length: int) -> float:
    """Decode the texts in blocks with drafts of a length, and return the tokens per block.

    A block emits the tokens whose pieces are all accepted, and one more.
    """
    starts = places.take(places.first_P)
    accepted_S = drafts.count_accepted(length)
    kept_SK = starts.ends_PK & (torch.arange(OFFSETS) < accepted_S[:, None])
    tokens, texts = kept_SK.sum(1).tolist(), starts.text_P.tolist()
    blocks, at = 0, 0
    while at < len(texts):
        blocks += 1
        after = at + 1 + tokens[at]
        while after > at + 1 and (after > len(texts) or texts[after - 1] != texts[at]):
            after -= 1  # the text ends with the draft
        at = after
    return len(texts) / blocks


@dataclass(frozen=True)
class BlockCosts:
    """Milliseconds of the parts of a block.

    Attributes:
        target: of a target pass over one token.
        token: of each further token.
        drafter: of a drafter pass.
        head: of each piece that a head proposes.
    """

    target: float
    token: float
    drafter: float
    head: float

    def tokens_per_second(self, tokens: float, drafted: float, passes: int, heads: int) -> float:
        """Return the speed of blocks with this many tokens, drafted tokens, drafter passes and pieces of heads."""
        spent = self.target + self.token * drafted + self.drafter * passes + self.head * heads
        return 1000 * tokens / spent


def best_length(drafts: Drafts, places: Places, costs: BlockCosts) -> tuple[int, float]:
    """Return the length of drafts with the highest speed, 0 for none, and that speed."""
    starts = int(places.first_P.sum())
    found = [(costs.tokens_per_second(1.0, 0.0, 0, 0), 0)]
    for length, passes in enumerate(drafts.passes, 1):
        drafted = length * starts / len(places.before_P)  # tokens per piece of the texts
        tokens = tokens_per_block(drafts, places, length)
        found.append((costs.tokens_per_second(tokens, drafted, passes, length - passes), length))
    speed, length = max(found, key=lambda one: one[0])
    return length, speed
