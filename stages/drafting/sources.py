"""Choosing, per row and block, between a draft of the model, a token tree of the own text or the memory, and none.

The choice depends on past verdicts and on the tree only, never on the model's present draws: a choice that depended on
these would change the distribution of the model's pieces.

In a few blocks the action is drawn instead, so that the log shows what each action is worth. What a block gives depends
on where in the text it is. The policy takes each action where it promises most, so averages over the blocks of each
action do not compare them. Where the action was drawn, with a known chance, a block counts as 1 / chance blocks of its
kind (inverse-propensity weighting).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import sqrt
from typing import NamedTuple

from stages.contract.blocks import Verdict
from stages.contract.snapshot import State
from stages.drafting.costs import CostModel
from store.events import Action

_MASK = (1 << 64) - 1

GAIN_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6, 2.5)  # expected accepted candidates of a tree; the model has statistics for each
DISCOUNT = 0.99  # of the statistics of a kind of blocks, per block of that kind, whatever drafts
SLOW_DISCOUNT = 0.999  # of those of all kinds, per block: what is not tried for long is unknown again
SHARED = 4.0  # drafts of any kind that count for one kind
OPTIMISM = 0.35  # tokens added to a draft's before the first one of a kind; divided by sqrt(N + 1) after N drafts
PRIOR = (5.0, 5.0, 4.0, 3.0)  # tokens of three drafts, and the pieces drawn and verified; they are never discounted
KEPT = 0.1  # of the statistics of the model in each kind of blocks, where it may have become better


@dataclass
class _Drafts:
    """Drafts of the model: the tokens of their blocks, the pieces drawn and verified, and their number, discounted."""

    tokens: float = 0.0
    drawn: float = 0.0
    verified: float = 0.0
    number: float = 0.0

    def discount(self, factor: float) -> None:
        self.tokens, self.drawn, self.verified, self.number = (factor * own for own in astuple(self))

    def add(self, tokens: float, drawn: float, verified: float) -> None:
        self.tokens, self.drawn, self.verified = self.tokens + tokens, self.drawn + drawn, self.verified + verified
        self.number += 1


class SourceChooser:
    """Chooses what has the highest expected tokens per cost.

    A tree's tokens are predicted by its calibrated chances; the model's are those of its recent drafts where trees
    promised about as much (a kind of blocks): text that the memory knows is often text that the model knows. While few
    drafts are known, those of all kinds count too, and the model is taken to be better than its mean by what is
    uncertain about it. Its cost is that of drafts of their mean length by today's costs. Discounts make what is not
    tried more uncertain, so it is tried again: less often, the more it lost by. This is the discounted upper confidence
    bound of Garivier and Moulines (2011).

    >>> from stages.drafting.costs import Costs
    >>> chooser = SourceChooser(Costs(target=((1, 1.0), (2, 1.06)), drafter=((1, 0.24),)))
    >>> chooser.choose(candidates=1, expected=0.2).value  # (5/3 + 0.35) / 1.48 is more than 1.2 / 1.06
    'model'
    >>> chooser.choose(candidates=4, expected=3.0).value
    'copies'

    Args:
        rows: number of rows of a batch, which are assumed to have equal drafts.
        may_rest: whether nothing is drafted where that is faster; else only where nothing can be drafted.

    Attributes:
        rows: may change between blocks.
    """

    def __init__(self, costs: CostModel, rows: int = 1, *, may_rest: bool = True) -> None:
        self._costs, self.rows, self._may_rest = costs, rows, may_rest
        self._all, self._kinds = _Drafts(), [_Drafts() for _ in range(len(GAIN_EDGES) + 1)]

    def choose(self, candidates: int, expected: float, *, model: bool = True, more: float = 0.0) -> Action:
        """Return the action of a row.

        Args:
            candidates: of the tree that the row may have; 0: there is none.
            expected: number of these that are expected to be accepted.
            model: whether the model can draft for the row.
            more: what else the model's draft costs for this row, in the unit of the costs.
        """
        speeds: dict[Action, float] = {}
        if candidates:
            cost = self._costs.verification_cost(self.rows * (1 + candidates)) / self.rows + self._costs.tree_cost()
            speeds[Action.COPIES] = (1 + expected) / cost
        if model:
            tokens, cost = self.foresee_model(expected)
            speeds[Action.MODEL] = tokens / (cost + more)
        if self._may_rest or not speeds:
            speeds[Action.NOTHING] = self.rows / self._costs.verification_cost(self.rows)
        return max(speeds, key=lambda action: speeds[action])

    def foresee_model(self, expected: float) -> tuple[float, float]:
        """Return what the model's draft is hoped to emit for a row whose tree promises so much, and what it costs."""
        here, every = self._kind(expected), [own + prior for own, prior in zip(astuple(self._all), PRIOR, strict=True)]
        share, known = SHARED / every[3], here.number + SHARED
        tokens, drawn, verified, _ = (
            (own + share * other) / known for own, other in zip(astuple(here), every, strict=True)
        )
        fewer = int(drawn)
        low, high = (self._costs.drafts_cost([length] * self.rows) for length in (fewer, fewer + 1))
        cost = self._costs.verification_cost(self.rows * (1 + verified)) + low + (drawn - fewer) * (high - low)
        return tokens + OPTIMISM / sqrt(here.number + 1), cost / self.rows

    def _kind(self, expected: float) -> _Drafts:
        return self._kinds[bisect_right(GAIN_EDGES, expected)]

    def try_model(self) -> None:
        """Forget most of what is known of the model, because it may be better than it was."""
        self._all = _Drafts()
        for drafts in self._kinds:
            drafts.discount(KEPT)

    def observe(self, verdict: Verdict, action: Action, expected: float, drawn: int) -> None:
        """Update with the outcome of a row's block.

        Args:
            action: the preferred one, which was taken.
            expected: accepted candidates of the tree that the row had or could have had.
            drawn: pieces that the model drew, dropped ones included.
        """
        kind = self._kind(expected)
        kind.discount(DISCOUNT)
        self._all.discount(SLOW_DISCOUNT)
        if action is Action.MODEL:
            for drafts in (kind, self._all):
                drafts.add(1.0 + verdict.accepted, drawn, len(verdict.proposal.verifiable))

    def state_dict(self) -> State:
        """Return the sums of the model's drafts: of all, then of each kind."""
        return [astuple(drafts) for drafts in (self._all, *self._kinds)]

    def load_state_dict(self, state: State) -> None:
        self._all, *self._kinds = (_Drafts(*sums) for sums in state)


class Choice(NamedTuple):
    """What a row does in a block."""

    action: Action  # what is done
    propensity: float  # the chance with which this action was taken
    drawn: bool  # whether the action was drawn instead of preferred


class Exploration:
    """Draws the action of a few blocks. A draw depends on the seed, the prompt's offset and the block's number only, so
    that a resumed run draws the same, and the text keeps the target's distribution.

    >>> exploration = Exploration(share=0.25, seed=0, actions=(Action.NOTHING, Action.COPIES, Action.MODEL))
    >>> choices = [exploration.choose(offset=0, block=block, preferred=Action.COPIES) for block in range(12)]
    >>> [choice.action.value for choice in choices if choice.drawn]
    ['copies', 'nothing', 'nothing', 'model']
    >>> sorted({round(choice.propensity, 4) for choice in choices})
    [0.0833, 0.8333]
    """

    def __init__(self, share: float, seed: int, actions: Sequence[Action]) -> None:
        self._share, self._seed, self._actions = share, seed, tuple(actions)

    def choose(self, offset: int, block: int, preferred: Action) -> Choice:
        """Return the preferred action or, in a block that explores, a drawn one."""
        if not self._share:
            return Choice(preferred, 1.0, drawn=False)
        number = _mix(_mix(_mix(self._seed) ^ offset) ^ block)
        drawn = (number >> 11) * 2.0**-53 < self._share
        action = self._actions[_mix(number) % len(self._actions)] if drawn else preferred
        uniform = self._share / len(self._actions)
        return Choice(action, uniform + (1 - self._share) * (action is preferred), drawn)


def _mix(number: int) -> int:
    """Return 64 bits that look random and depend on a number alone (SplitMix64, Steele and others 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


NO_EXPLORATION = Exploration(0.0, 0, tuple(Action))
