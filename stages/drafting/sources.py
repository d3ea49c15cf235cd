"""Choosing, per row and block, between a token tree, a draft of the model and no draft.

The choice depends on past verdicts and on the tree only, never on the model's present draws: a choice that depended on
these would change the distribution of the model's pieces.
"""

from bisect import bisect_right
from dataclasses import astuple, dataclass
from math import sqrt

from stages.contract.blocks import Verdict
from stages.contract.snapshot import State
from stages.drafting.costs import CostModel
from store.events import Action

GAIN_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6, 2.5)  # expected accepted candidates of a tree; the model has statistics for each
DISCOUNT = 0.99  # of the statistics of a kind of blocks, per block of that kind, whatever drafts
SLOW_DISCOUNT = 0.999  # of those of all kinds, per block: what is not tried for long is unknown again
SHARED = 4.0  # drafts of any kind that count for one kind
OPTIMISM = 0.35  # tokens added to a draft's before the first one of a kind; divided by sqrt(N + 1) after N drafts
PRIOR = (5.0, 5.0, 4.0, 3.0)  # tokens of three drafts, and the pieces drawn and verified; they are never discounted
PRIOR_SPEED = (26.0, 20.0)  # tokens and cost of twenty blocks
PRIOR_ACCEPTED = 8.0  # candidates of trees that are taken to have been accepted as often as expected
KEPT = 0.1  # of the statistics of the model in each kind of blocks, where it may have become better


@dataclass
class _Blocks:
    """Blocks, whatever drafted: their tokens and their costs in blocks without drafts, discounted."""

    tokens: float = 0.0
    cost: float = 0.0

    def add(self, tokens: float, cost: float) -> None:
        self.tokens, self.cost = DISCOUNT * self.tokens + tokens, DISCOUNT * self.cost + cost


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


@dataclass
class _Trees:
    """Candidates of trees that were expected to be accepted, and those that were, discounted."""

    expected: float = 0.0
    accepted: float = 0.0

    def add(self, expected: float, accepted: float) -> None:
        self.expected, self.accepted = DISCOUNT * self.expected + expected, DISCOUNT * self.accepted + accepted

    @property
    def correction(self) -> float:
        """The factor by which more are accepted than expected: chances begin with a low prior."""
        return (self.accepted + PRIOR_ACCEPTED) / (self.expected + PRIOR_ACCEPTED)


class SourceChooser:
    """Compares trees and no draft with the model's drafts, by expected tokens beyond what a block's time is worth.

    What a block's time is worth are the tokens that recent blocks emitted in as much time: so a short block may be
    better than a longer one with more tokens per second. A tree's tokens are predicted by its calibrated chances, and
    corrected by what trees of the kind have lately given; the model's are those of its recent drafts where trees
    promised about as much (a kind of blocks): text that the memory knows is often text that the model knows. While few
    drafts are known, those of all kinds count too, and the model is taken to be better than its mean by what is
    uncertain about it. Its cost is that of drafts of their mean length by today's costs. Discounts make what is not
    tried more uncertain, so it is tried again: less often, the more it lost by. This is the discounted upper confidence
    bound of Garivier and Moulines (2011).

    >>> from stages.drafting.costs import Costs
    >>> chooser = SourceChooser(Costs(target=((1, 1.0), (2, 1.06)), drafter=((1, 0.24),)))
    >>> chooser.prefers_model(candidates=1, expected=0.2)  # 5/3 + 0.35 - 1.3 * 1.48 is more than 1.2 - 1.3 * 1.06
    True
    >>> chooser.prefers_model(candidates=4, expected=3.0)
    False

    Args:
        rows: number of rows of a batch, which are assumed to have equal drafts.
        may_rest: whether nothing is drafted where there is no tree and the model's drafts do not pay; else it drafts
            there always.

    Attributes:
        rows: may change between blocks.
    """

    def __init__(self, costs: CostModel, rows: int = 1, *, may_rest: bool = True) -> None:
        self._costs, self.rows, self._may_rest = costs, rows, may_rest
        kinds = range(len(GAIN_EDGES) + 1)
        self._speed, self._all = _Blocks(*PRIOR_SPEED), _Drafts()
        self._at, self._trees = [_Drafts() for _ in kinds], [_Trees() for _ in kinds]

    def prefers_model(self, candidates: int, expected: float, more: float = 0.0) -> bool:
        """Return whether the model drafts instead of a tree of this many candidates and expected accepted ones; without
        candidates: instead of no draft.

        Args:
            more: what else the model's draft costs for this row, in the unit of the costs.
        """
        if not (candidates or self._may_rest):
            return True
        kind, worth = bisect_right(GAIN_EDGES, expected), self._speed.tokens / self._speed.cost
        tokens = 1 + expected * self._trees[kind].correction
        model_tokens, model_cost = self._foresee_model(kind)
        model_cost += more / self._costs.verification_cost(self.rows)
        return model_tokens - worth * model_cost > tokens - worth * self._verification_cost(candidates)

    def _foresee_model(self, kind: int) -> tuple[float, float]:
        """Return what the model's draft is hoped to give in a kind of blocks, and what it costs."""
        here, every = self._at[kind], [own + prior for own, prior in zip(astuple(self._all), PRIOR, strict=True)]
        share, known = SHARED / every[3], here.number + SHARED
        tokens, drawn, verified, _ = (
            (own + share * other) / known for own, other in zip(astuple(here), every, strict=True)
        )
        cost = self._verification_cost(verified) + self._drafting_cost(drawn)
        return tokens + OPTIMISM / sqrt(here.number + 1), cost

    def _verification_cost(self, drafted: float) -> float:
        """Return the cost of a block whose rows have so many tokens to be verified, in blocks without drafts."""
        cost = self._costs.verification_cost(self.rows * (1 + drafted))
        return cost / self._costs.verification_cost(self.rows)

    def _drafting_cost(self, drawn: float) -> float:
        """Return the cost of drawing so many pieces for every row, in blocks without drafts."""
        fewer = int(drawn)
        low, high = (self._costs.drafts_cost([length] * self.rows) for length in (fewer, fewer + 1))
        return (low + (drawn - fewer) * (high - low)) / self._costs.verification_cost(self.rows)

    def try_model(self) -> None:
        """Forget most of what is known of the model, because it may be better than it was."""
        self._all = _Drafts()
        for drafts in self._at:
            drafts.discount(KEPT)

    def observe(self, verdict: Verdict, action: Action, expected: float, drawn: int) -> None:
        """Update with the outcome of a row's block.

        Args:
            action: the preferred one, which was taken.
            expected: accepted candidates of the tree that the row had or could have had.
            drawn: pieces that the model drew, dropped ones included.
        """
        kind, tokens = bisect_right(GAIN_EDGES, expected), 1.0 + verdict.accepted
        verified = len(verdict.proposal.verifiable)
        cost = self._verification_cost(verified)
        self._at[kind].discount(DISCOUNT)
        self._all.discount(SLOW_DISCOUNT)
        if action is Action.MODEL:
            cost += self._drafting_cost(drawn)
            self._all.add(tokens, drawn, verified)
            self._at[kind].add(tokens, drawn, verified)
        elif action is Action.COPIES:
            self._trees[kind].add(expected, verdict.accepted)
        self._speed.add(tokens, cost)

    def state_dict(self) -> State:
        """Return the sums of all blocks, of the model's drafts (all, then each kind), and of the trees of each kind."""
        drafts = [astuple(drafts) for drafts in (self._all, *self._at)]
        return {"speed": astuple(self._speed), "drafts": drafts, "trees": [astuple(trees) for trees in self._trees]}

    def load_state_dict(self, state: State) -> None:
        self._speed = _Blocks(*state["speed"])
        self._all, *self._at = (_Drafts(*sums) for sums in state["drafts"])
        self._trees = [_Trees(*sums) for sums in state["trees"]]
