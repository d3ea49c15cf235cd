"""Choosing, per row and block, between a token tree, a draft of the model and no draft.

The choice depends on past verdicts and on the tree only, never on the model's present draws: a choice that depended on
these would change the distribution of the model's pieces.
"""

from bisect import bisect_right
from dataclasses import astuple, dataclass
from math import sqrt

from stages.contract.blocks import Verdict
from stages.contract.snapshot import Saved, SnapshotReader
from stages.drafting.costs import CostModel
from store.events import Action

GAIN_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6, 2.5)  # expected accepted candidates of a tree; the model has statistics for each
DISCOUNT = 0.99  # of the statistics of a kind of blocks, per block of that kind, whatever drafts
SHARED = 4.0  # blocks without drafts in whose cost the drafts of all kinds count for one kind
OPTIMISM = 0.35  # added to a rate before the first draft of a kind; divided by sqrt(N + 1) after N drafts
PRIOR = (5.0, 4.0)  # tokens and cost, of four drafts
LEFT = 0.1  # of the statistics of every kind, where the model may have become better


@dataclass
class _Drafts:
    """Drafts of the model: their tokens, their costs in blocks without drafts, and their number, all discounted."""

    tokens: float = 0.0
    cost: float = 0.0
    number: float = 0.0

    def discount(self, factor: float) -> None:
        self.tokens, self.cost, self.number = factor * self.tokens, factor * self.cost, factor * self.number

    def add(self, tokens: float, cost: float) -> None:
        self.tokens, self.cost, self.number = self.tokens + tokens, self.cost + cost, self.number + 1


@dataclass(frozen=True)
class SourceChooserState:
    """Saved state of a `SourceChooser`: the sums of all of the model's drafts, then those of each kind. Checkpoints of
    older releases lack them: the model is unknown then.
    """

    drafts: list[tuple[float, float, float]] | None = None


class SourceChooser:
    """Compares trees and no draft with the model's drafts, by emitted tokens per cost of a block without drafts.

    A tree's tokens are predicted by its calibrated chances. The model's rate is that of its recent drafts where trees
    promised about as much (a kind of blocks): text that the memory knows is often text that the model knows. While few
    drafts are known, the rate of all kinds counts too, and the model is taken to be better than its mean by what is
    uncertain about it. Discounts make what is not tried more uncertain, so it is tried again: less often, the more it
    lost by. This is the discounted upper confidence bound of Garivier and Moulines (2011).

    >>> from stages.drafting.costs import Costs
    >>> chooser = SourceChooser(Costs(target=((1, 1.0), (2, 1.06)), drafter=((1, 0.24),)))
    >>> chooser.prefers_model(candidates=1, expected=0.2)  # 5 / 4 + 0.35 is more than 1.2 / 1.06
    True
    >>> chooser.prefers_model(candidates=4, expected=3.0)
    False

    Args:
        costs: costs of the models' passes.
        rows: number of rows of a batch, which are assumed to have equal drafts.
        may_rest: whether nothing is drafted where there is no tree and the model's drafts do not pay; else it drafts
            there always.

    Attributes:
        rows: may change between blocks.
    """

    def __init__(self, costs: CostModel, rows: int = 1, *, may_rest: bool = True) -> None:
        self._costs, self.rows, self._may_rest = costs, rows, may_rest
        self._all = _Drafts(*PRIOR, SHARED)
        self._at = [_Drafts() for _ in range(len(GAIN_EDGES) + 1)]

    def tree_rate(self, candidates: int, expected: float) -> float:
        """Return the tokens per cost of a tree, relative to plain decoding."""
        cost = self._costs.verification_cost(self.rows * (1 + candidates))
        return (1 + expected) * self._costs.verification_cost(self.rows) / cost

    def prefers_model(self, candidates: int, expected: float) -> bool:
        """Return whether the model drafts instead of a tree of this many candidates and expected accepted ones; without
        candidates: instead of no draft.
        """
        if not (candidates or self._may_rest):
            return True
        return self._hoped_rate(bisect_right(GAIN_EDGES, expected)) > self.tree_rate(candidates, expected)

    def _hoped_rate(self, kind: int) -> float:
        """Return the model's rate in a kind of blocks, and what it may be more."""
        here = self._at[kind]
        mean = (here.tokens + SHARED * self._all.tokens / self._all.cost) / (here.cost + SHARED)
        return mean + OPTIMISM / sqrt(here.number + 1)

    def try_model(self) -> None:
        """Forget most of what is known of the model, because it may be better than it was."""
        self._all = _Drafts(*PRIOR, SHARED)
        for drafts in self._at:
            drafts.discount(LEFT)

    def observe(self, verdict: Verdict, action: Action, expected: float, drawn: int) -> None:
        """Update with the outcome of a row's block.

        Args:
            verdict: on its draft.
            action: the preferred one, which was taken.
            expected: accepted candidates of the tree that the row had or could have had.
            drawn: pieces that the model drew, dropped ones included.
        """
        here = self._at[bisect_right(GAIN_EDGES, expected)]
        here.discount(DISCOUNT)
        if action is not Action.MODEL:
            return
        pieces = len(verdict.proposal.draft.pieces)
        cost = self._costs.verification_cost(self.rows * (1 + pieces)) + self._costs.drafts_cost([drawn] * self.rows)
        self._all.discount(DISCOUNT)
        for drafts in (self._all, here):
            drafts.add(1.0 + verdict.accepted, cost / self._costs.verification_cost(self.rows))

    def save(self) -> SourceChooserState:
        """Return the state for a checkpoint."""
        return SourceChooserState([astuple(drafts) for drafts in (self._all, *self._at)])

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Restore a saved state."""
        state = reader.decode(SourceChooserState, saved)
        if state.drafts is not None:
            self._all, *self._at = (_Drafts(*sums) for sums in state.drafts)
