"""Choosing, per row and block, between a token tree, a draft of the model and no draft.

The choice depends on past verdicts and on the tree only, never on the model's present draws: a choice that depended on
these would change the distribution of the model's pieces.
"""

from bisect import bisect_right
from dataclasses import dataclass

from stages.contract.blocks import Verdict
from stages.contract.snapshot import Saved, SnapshotReader
from stages.drafting.costs import CostModel
from store.events import Action

GAIN_EDGES = (0.1, 0.3, 0.6, 1.0, 1.6, 2.5)  # expected accepted candidates of a tree; the model has statistics for each
EVERY_MODEL_TURN = 32  # after so many blocks of all rows with gains of one kind the model drafts, for comparison
# Such blocks: the wait doubles with every comparison that the model loses. A drift or an update of the drafter begins
# with the shortest wait again, so little is missed by long ones.
LONGEST_WAIT = 1024


@dataclass
class _DecayedRatio:
    """A ratio of two exponentially decayed sums. The initial sums are a prior."""

    numerator: float
    denominator: float
    decay: float

    def add(self, above: float, below: float) -> None:
        self.numerator = self.decay * self.numerator + above
        self.denominator = self.decay * self.denominator + below

    @property
    def value(self) -> float:
        return self.numerator / self.denominator


@dataclass(frozen=True)
class SourceChooserState:
    """Saved state of a `SourceChooser`: the sums of its ratios, the blocks since the model's last draft, and after how
    many it drafts again. Checkpoints of older releases lack the last.
    """

    ratios: list[tuple[float, float]]
    turns: list[int]
    waits: list[int] | None = None


class SourceChooser:
    """Compares trees and no draft with the model's drafts, by emitted tokens per cost of a block without drafts.

    A tree's tokens are predicted by its calibrated chances. The model's are those of its recent drafts where trees
    promised about as much: text that the memory knows is often text that the model knows.

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
        kinds = range(len(GAIN_EDGES) + 1)
        self._model = _DecayedRatio(5.0, 4.0, 0.95)
        self._model_at = [_DecayedRatio(0.0, 0.0, 0.95) for _ in kinds]
        self._turns = [0 for _ in kinds]
        self._waits = [EVERY_MODEL_TURN for _ in kinds]
        self._rivals = [0.0 for _ in kinds]  # the rates that the model was last compared with, in this block

    def tree_rate(self, candidates: int, expected: float) -> float:
        """Return the tokens per cost of a tree, relative to plain decoding."""
        cost = self._costs.verification_cost(self.rows * (1 + candidates))
        return (1 + expected) * self._costs.verification_cost(self.rows) / cost

    def prefers_model(self, candidates: int, expected: float) -> bool:
        """Return whether the model drafts instead of a tree of this many candidates and expected accepted ones; without
        candidates: instead of no draft.
        """
        kind = bisect_right(GAIN_EDGES, expected)
        self._rivals[kind] = self.tree_rate(candidates, expected)
        if self._is_due(kind) or not (candidates or self._may_rest):
            return True
        return self._model_rate(kind) > self._rivals[kind]

    def try_model(self) -> None:
        """Let the model draft at the next block of each kind, because it may be better than it was."""
        self._waits = [EVERY_MODEL_TURN for _ in self._waits]
        self._turns = [wait * self.rows for wait in self._waits]

    def _is_due(self, kind: int) -> bool:
        return self._turns[kind] >= self._waits[kind] * self.rows

    def _model_rate(self, kind: int) -> float:
        """Return the model's rate where trees promise this, shrunk to its overall rate while there are few samples."""
        here, weight = self._model_at[kind], 4
        return (here.numerator + weight * self._model.value) / (here.denominator + weight)

    def observe(self, verdict: Verdict, action: Action, expected: float, drawn: int) -> None:
        """Update with the outcome of a row's block.

        Args:
            verdict: on its draft.
            action: the preferred one, which was taken.
            expected: accepted candidates of the tree that the row had or could have had.
            drawn: pieces that the model drew, dropped ones included.
        """
        kind = bisect_right(GAIN_EDGES, expected)
        if action is not Action.MODEL:
            self._turns[kind] += 1
            return
        was_due, self._turns[kind] = (
            self._is_due(kind),
            0,
        )  # also if the model had nothing to propose: else it would have every turn from then on
        if drawn:
            pieces = len(verdict.proposal.draft.pieces)
            cost = self._costs.verification_cost(self.rows * (1 + pieces)) + self._costs.drafts_cost(
                [drawn] * self.rows
            )
            sums = 1.0 + verdict.accepted, cost / self._costs.verification_cost(self.rows)
            self._model.add(*sums)
            self._model_at[kind].add(*sums)
            loses = was_due and self._model_rate(kind) <= self._rivals[kind]
            self._waits[kind] = min(2 * self._waits[kind], LONGEST_WAIT) if loses else EVERY_MODEL_TURN

    def save(self) -> SourceChooserState:
        """Return the state for a checkpoint."""
        ratios = [(ratio.numerator, ratio.denominator) for ratio in self._ratios()]
        return SourceChooserState(ratios, list(self._turns), list(self._waits))

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Restore a saved state."""
        state = reader.decode(SourceChooserState, saved)
        for ratio, sums in zip(self._ratios(), state.ratios, strict=True):
            ratio.numerator, ratio.denominator = sums
        self._turns = list(state.turns)
        if state.waits is not None:
            self._waits = list(state.waits)

    def _ratios(self) -> list[_DecayedRatio]:
        return [self._model, *self._model_at]
