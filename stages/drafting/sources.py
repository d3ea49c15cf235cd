"""Choosing, per row and block, between a draft of the model, a token tree of the own text or the memory, and none.

The choice depends on past verdicts and on the tree only, never on the model's present draws: a choice that depended on
these would change the distribution of the model's pieces.

A few blocks try the model whatever is expected of it: so its acceptance stays known where it does not pay, and a fall
of it, and a rise by learning, are noticed.

In a few blocks the action is drawn instead, so that the log shows what each action is worth. What a block gives depends
on where in the text it is. The policy takes each action where it promises most, so averages over the blocks of each
action do not compare them. Where the action was drawn, with a known chance, a block counts as 1 / chance blocks of its
kind (inverse-propensity weighting).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from stages.contract.blocks import SequenceState, Verdict
from stages.contract.snapshot import State
from stages.drafting.costs import CostModel
from stages.sampling.random_source import is_sampled
from store.events import Action

_MASK = (1 << 64) - 1

GAIN_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6, 2.5)  # expected accepted candidates of a tree; the model has statistics for each
DISCOUNT = 0.97  # of the statistics of a kind of blocks, and of all, per draft of the model
SHARED = 4.0  # drafts of any kind that count for one kind
# In half of the prompts one block in eight tries the model: with a third of them, a fall was noticed late where the
# model does not pay. Where little is accepted, nothing can fall, and one prompt in eight is enough: there a trial takes
# 3 ms more than it gives, next to .4 where much is, and reading a prompt 4.5.
TRIED_PROMPTS, RARELY_TRIED, TRIED_BLOCKS = 2, 8, 8
KEPT = 0.03  # of the statistics of the model in each kind of blocks, where it may have become better


class _Drafts(NamedTuple):
    """Sums over drafts of the model, discounted."""

    tokens: float = 0.0  # that their blocks emitted
    drawn: float = 0.0  # pieces
    verified: float = 0.0  # tokens
    judged: float = 0.0  # of these
    number: float = 0.0

    def discount(self, factor: float) -> "_Drafts":
        return _Drafts(*(factor * own for own in self))

    def add(self, other: "_Drafts") -> "_Drafts":
        return _Drafts(*map(sum, zip(self, other, strict=True)))


PRIOR = _Drafts(tokens=5, drawn=5, verified=4, judged=3, number=3)  # never discounted


class SourceChooser:
    """Chooses what has the highest expected tokens per cost.

    A tree's tokens are predicted by its calibrated chances; the model's are those of its recent drafts where trees
    promised about as much (a kind of blocks): text that the memory knows is often text that the model knows. While few
    drafts are known, those of all kinds count too. Its cost is that of drafts of their mean length by today's costs.

    >>> from stages.drafting.costs import Costs
    >>> chooser = SourceChooser(Costs(target=((1, 1.0), (2, 1.06)), drafter=((1, 0.24),)))
    >>> chooser.choose(candidates=1, expected=0.1).value  # 5/3 tokens in 1.46 are more than 1.1 in 1.06
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
        self._sums = [_Drafts()] * (len(GAIN_EDGES) + 2)  # of all, then of each kind

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
        """Return what the model's draft is expected to emit for a row whose tree promises so much, and its cost."""
        here, every = self._sums[_kind(expected)], self._all
        known = here.add(every.discount(SHARED / every.number))
        tokens, drawn, verified, *_ = known.discount(1 / known.number)
        fewer = int(drawn)
        low, high = (self._costs.drafts_cost([length] * self.rows) for length in (fewer, fewer + 1))
        cost = self._costs.verification_cost(self.rows * (1 + verified)) + low + (drawn - fewer) * (high - low)
        return tokens, cost / self.rows

    @property
    def trial_interval(self) -> int:
        """Of how many prompts one has trials: of fewer while the model's drafts give what they are taken to give."""
        every = self._all
        return TRIED_PROMPTS if every.tokens / every.number >= PRIOR.tokens / PRIOR.number else RARELY_TRIED

    def measure_acceptance(self) -> float:
        """Return the acceptance rate of the model's drafts."""
        every = self._all
        return (every.tokens - every.number) / every.judged

    @property
    def _all(self) -> _Drafts:
        return self._sums[0].add(PRIOR)

    def try_model(self) -> None:
        """Forget most of what is known of the model, because it may be better than it was."""
        self._sums = [_Drafts(), *(kind.discount(KEPT) for kind in self._sums[1:])]

    def observe(self, verdict: Verdict, action: Action, expected: float, drawn: int) -> None:
        """Update with the outcome of a row's block.

        Args:
            action: the preferred one, which was taken.
            expected: accepted candidates of the tree that the row had or could have had.
            drawn: pieces that the model drew, dropped ones included.
        """
        if action is Action.MODEL:
            own = _Drafts(1.0 + verdict.accepted, drawn, len(verdict.proposal.verifiable), verdict.judged, 1)
            for place in (0, _kind(expected)):
                self._sums[place] = self._sums[place].discount(DISCOUNT).add(own)

    def state_dict(self) -> State:
        """Return the sums of the model's drafts: of all, then of each kind."""
        return list(self._sums)

    def load_state_dict(self, state: State) -> None:
        self._sums = [_Drafts(*sums) for sums in state]


def _kind(expected: float) -> int:
    return 1 + bisect_right(GAIN_EDGES, expected)


def is_trial(row: SequenceState, interval: int = TRIED_PROMPTS) -> bool:
    """Return whether the row's present block tries the model, where one prompt in so many does. All that is drafted in
    it is verified: the acceptance head, too, learns nothing from pieces that are never verified.
    """
    return row.block % TRIED_BLOCKS == 1 and is_sampled(row.offset, interval)


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
