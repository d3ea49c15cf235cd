"""Sources of drafts other than the drafter's model: they copy earlier text, which needs no drafter pass.

A copied piece has probability 1 under its distribution, so the rules of verification apply unchanged, at any
temperature. The source is chosen from past verdicts only: a choice that depended on the model's present draws would
change the distribution of the model's pieces.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stages.contract.blocks import SequenceState, Verdict
from stages.contract.snapshot import Saved, SnapshotReader
from stages.drafting.costs import Costs
from store.events import DraftSource, Outcome

# Matches of 2, 3, 4-5, 6-8, 9-16 and more pieces have separate statistics.
LENGTH_EDGES = (3, 4, 6, 9, 17)
EVERY_MODEL_TURN = 32  # after this many consecutive copies at matches of one length the model drafts, for comparison


class Offer(NamedTuple):
    """The pieces that a source offers, and their expected tokens per cost, relative to plain decoding."""

    pieces: tuple[int, ...]
    rate: float


class CopySource(Protocol):
    """Offers drafts for rows in flight. Its state changes between blocks only.

    Attributes:
        source: the name under which its drafts are logged.
        key: key of its state in a checkpoint.
    """

    source: DraftSource
    key: str

    def admit(self, row: SequenceState) -> None:
        """Add a row: a new one, or one of a checkpoint that is resumed."""
        ...

    def release(self, row: SequenceState) -> None:
        """Remove a row and its state."""
        ...

    def offer(self, row: SequenceState) -> Offer | None:
        """Return the draft that it offers for a row in this block; None if it has none or the model is faster.

        Called once per block for every row. Draws no random numbers.
        """
        ...

    def observe(self, verdict: Verdict) -> None:
        """Update with the verdict on a row's draft, of any source. Called once per block and row, after `offer`."""
        ...

    def save(self) -> Saved:
        """Return the state for a checkpoint, without what can be computed from the rows."""
        ...

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Restore a saved state. The rows are admitted afterwards."""
        ...


def count_accepted_pieces(verdict: Verdict) -> int:
    """Count the pieces of the draft that became accepted tokens."""
    judged = ((one.proposed, one.outcome) for one in verdict.decisions)
    return max((proposed.stop for proposed, outcome in judged if proposed and outcome is Outcome.ACCEPTED), default=0)


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
class DraftSourceSelectorState:
    """Saved state of a `DraftSourceSelector`: the sums of its ratios, and the copies since the model's last draft."""

    ratios: list[tuple[float, float]]
    turns: list[int]


class Copy(NamedTuple):
    """The number of pieces to copy, and their expected rate (see `Offer`)."""

    length: int
    rate: float


class DraftSourceSelector:
    """Compares copies with the model's drafts, by emitted tokens per cost of a target pass.

    A copied piece is judged in every block, also if the model drafted: the emitted text shows whether the piece would
    have been accepted. So statistics of copies need no trials. The acceptance probability of a copied piece depends on
    the number of matching pieces before it, the copied ones included.

    Args:
        costs: costs of the models' passes.
        rows: number of rows of a batch, which are assumed to have equal drafts.
    """

    def __init__(self, costs: Costs, rows: int = 1) -> None:
        self._costs, self._rows, self._pass = costs, rows, costs.verification_cost(rows)
        buckets = range(len(LENGTH_EDGES) + 1)
        self._copied = [_DecayedRatio(0.8, 4.0, 0.98) for _ in buckets]  # pessimistic: copies are judged anyway
        self._model = _DecayedRatio(5.0, 4.0, 0.95)
        self._model_at = [_DecayedRatio(0.0, 0.0, 0.95) for _ in buckets]
        self._turns = [0 for _ in buckets]

    def choose_length(self, match: int, most: int) -> Copy:
        """Return the number of pieces to copy after a match, at most `most`; 0 if the model is faster."""
        best = Copy(0, 1.0)
        for length, rate in enumerate(self._rates(match, most), start=1):
            if rate > best.rate:
                best = Copy(length, rate)
        due = self._turns[_bucket(match)] >= EVERY_MODEL_TURN
        return Copy(0, 1.0) if due or best.rate <= self._model_rate(match) else best

    def _rates(self, match: int, most: int) -> Iterator[float]:
        """Yield the expected rates of copying 1, 2, ... pieces."""
        chance, accepted = 1.0, 0.0
        for count in range(1, most + 1):
            chance *= self._copied[_bucket(match + count - 1)].value
            accepted += chance
            yield (1 + accepted) * self._pass / self._costs.verification_cost(self._rows * (1 + count))

    def _model_rate(self, match: int) -> float:
        """Return the model's rate at matches of this length, shrunk to its overall rate while there are few samples."""
        here, weight = self._model_at[_bucket(match)], 4
        return (here.numerator + weight * self._model.value) / (here.denominator + weight)

    def observe_copy(self, match: int, copied: Sequence[int], emitted: Sequence[int]) -> None:
        """Update with a copy, drafted or not, and the pieces that were emitted at its position."""
        for number, (piece, true) in enumerate(zip(copied, emitted, strict=False)):
            self._copied[_bucket(match + number)].add(float(piece == true), 1.0)
            if piece != true:
                return

    def count_copy(self, match: int) -> None:
        """Count a copy that was drafted."""
        self._turns[_bucket(match)] += 1

    def observe_model(self, match: int | None, drafted: int, accepted: int) -> None:
        """Update with a draft of the model: its length, its accepted pieces, and the match length, if there is one."""
        sums = 1.0 + accepted, self._costs.block_cost([drafted] * self._rows) / self._pass
        self._model.add(*sums)
        if match is not None:
            self._model_at[_bucket(match)].add(*sums)
            self._turns[_bucket(match)] = 0

    def save(self) -> DraftSourceSelectorState:
        """Return the state for a checkpoint."""
        return DraftSourceSelectorState(
            [(ratio.numerator, ratio.denominator) for ratio in self._ratios()], list(self._turns)
        )

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Restore a saved state of the same buckets."""
        state = reader.decode(DraftSourceSelectorState, saved)
        for ratio, sums in zip(self._ratios(), state.ratios, strict=True):
            ratio.numerator, ratio.denominator = sums
        self._turns = list(state.turns)

    def _ratios(self) -> list[_DecayedRatio]:
        return [*self._copied, self._model, *self._model_at]


def _bucket(match: int) -> int:
    return bisect_right(LENGTH_EDGES, match)
