"""Draft lengths: policies that decide whether a block drafts, and rules that select rows for one more piece."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from typing_extensions import override

from stages.contract.snapshot import Saved, SnapshotReader
from stages.drafting.costs import CostModel

Survival = Sequence[float]  # per drafted piece the estimated probability that it and all before it are accepted


class StopRule(Protocol):
    """Selects the rows that draft one more piece. Pure."""

    def select_rows(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        """Select the rows that draft one more piece. Called after every drafter pass of a block.

        Args:
            survivals: per row the survival of its draft; empty for a row that did not draft.
            open_rows: the rows that may draft one more piece; each has at least one.

        Returns:
            the selected ones of `open_rows`.
        """
        ...


class FixedLength(StopRule):
    """Drafts to the maximal length."""

    @override
    def select_rows(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        return open_rows


class ThresholdStop(StopRule):
    """The paper's rule (equation 7): stop when the probability of a rejection exceeds `threshold`."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    @override
    def select_rows(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        return [row for row in open_rows if 1 - survivals[row][-1] <= self._threshold]


class CostStop(StopRule):
    """Drafts while one more pass is expected to raise the emitted tokens per unit of time, of all rows together.

    A block of drafts emits about the number of rows plus all survivals. The acceptance of the next piece is not known
    yet; that of the last one is used instead. A drafter pass is shared: the rows with the highest estimates draft one
    more piece, as many as raise the rate.

    A target pass costs 9 + tokens, a drafter pass 1. One row has drafted one piece with survival 0.8: the block would
    emit 1 + 0.8 tokens at a cost of 9 + 2 + 1 = 12, 0.150 a unit. A second piece survives with 0.8 * 0.8: 2.44 tokens
    at a cost of 14, 0.174 a unit, so the row continues. With survival 0.2 it would fall from 1.2 / 12 to 1.24 / 14.

    >>> from stages.drafting.costs import Costs
    >>> rule = CostStop(Costs(target=((1, 10.0), (11, 20.0)), drafter=((1, 1.0),)))
    >>> rule.select_rows([[0.8]], open_rows=[0]), rule.select_rows([[0.2]], open_rows=[0])
    ([0], [])

    Two rows share the drafter's pass: 3.0 / 14 rises to 3.64 / 16 with the first alone, and to 3.68 / 17 with both.

    >>> rule.select_rows([[0.8], [0.2]], open_rows=[0, 1])
    [0]
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    @override
    def select_rows(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        lengths = list(map(len, survivals))
        emitted, spent = len(survivals) + sum(map(sum, survivals)), self._costs.block_cost(lengths)
        tokens = len(lengths) + sum(lengths)
        verifying = self._costs.verification_cost(tokens)
        ranked = sorted(open_rows, key=lambda row: -_next_survival(survivals[row]))
        best, chosen, gained = emitted / spent, 0, 0.0
        for number, row in enumerate(ranked, start=1):
            gained += _next_survival(survivals[row])
            more = self._costs.drafting_cost(number) + self._costs.verification_cost(tokens + number) - verifying
            if (emitted + gained) / (spent + more) > best:
                best, chosen = (emitted + gained) / (spent + more), number
        return ranked[:chosen]


def _next_survival(survival: Survival) -> float:
    """Estimate the survival of the next piece."""
    before = survival[-2] if len(survival) > 1 else 1.0
    return survival[-1] * survival[-1] / before if before > 0 else 0.0


class StopSettings(Protocol):
    """The settings of drafting that stop rules read."""

    stop_threshold: float


STOP_RULES: dict[str, Callable[[StopSettings, CostModel], StopRule]] = {  # by the value of the setting
    "cost": lambda settings, costs: CostStop(costs),
    "threshold": lambda settings, costs: ThresholdStop(settings.stop_threshold),
    "never": lambda settings, costs: FixedLength(),
}


class SpeculationPolicy(Protocol):
    """Decides whether blocks draft. `should_draft` is called before each block, `observe` after it."""

    def should_draft(self) -> bool:
        """Return whether the next block drafts."""
        ...

    def observe(self, lengths: Sequence[int], emitted: int) -> None:
        """Update with a block: pieces drafted per row, and tokens emitted by all rows. By default ignored."""
        return

    def resume(self, drafts: int = 1) -> None:
        """End a pause, because the text or the drafter changed since it was measured.

        Args:
            drafts: minimum number of drafts before the next pause.
        """
        return

    def save(self) -> Saved:
        """Return the state for a checkpoint; by default there is none."""
        return None

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        """Restore a saved state; by default there is none."""
        return


class AlwaysSpeculate(SpeculationPolicy):
    """Drafts in every block."""

    @override
    def should_draft(self) -> bool:
        return True


class AdaptiveSpeculationState(NamedTuple):
    """Saved state of an `AdaptiveSpeculation`, in the order of its attributes."""

    emitted: float
    plain: float
    on: int
    off: int
    rest: int


class AdaptiveSpeculation(SpeculationPolicy):
    """Compares the tokens per cost of recent drafting blocks with those of plain decoding; if plain decoding is faster,
    speculation is paused for a number of blocks, then tried again.

    Plain decoding emits one token per row and pass, so its rate is known. The first pause is short and doubles while
    trials fail, so drafting that is never faster costs the trials only. A drift or a drafter update ends a pause
    (`resume`).

    Args:
        costs: costs of the models' passes.
    """

    DECAY = 0.95  # decay of the sums per block
    PAUSE_DECAY = 0.1  # decay of the sums at a pause
    WARM_UP = 16  # drafts before the first comparison
    TRIAL, MIN_PAUSE, MAX_PAUSE = 4, 32, 256  # drafts of a trial; blocks of a pause

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._emitted = self._plain = 0.0  # recent tokens, and those of plain decoding in that time
        self._drafts_left = self.WARM_UP  # drafts until the next comparison
        self._pause_left = 0  # blocks left of the pause
        self._next_pause = self.MIN_PAUSE

    @override
    def should_draft(self) -> bool:
        return self._pause_left == 0

    @override
    def observe(self, lengths: Sequence[int], emitted: int) -> None:
        if self._pause_left:
            self._pause_left -= 1
            return
        rows = len(lengths)
        plain = rows * self._costs.block_cost(lengths) / self._costs.verification_cost(rows)
        self._emitted = self._emitted * self.DECAY + emitted
        self._plain = self._plain * self.DECAY + plain
        self._drafts_left = max(0, self._drafts_left - rows)
        if self._drafts_left:
            return
        if self._emitted < self._plain:
            self._pause_left, self._drafts_left = self._next_pause, self.TRIAL
            self._emitted *= self.PAUSE_DECAY  # so that the trial after the pause decides
            self._plain *= self.PAUSE_DECAY
            self._next_pause = min(self.MAX_PAUSE, 2 * self._next_pause)
        else:
            self._next_pause = self.MIN_PAUSE

    @override
    def resume(self, drafts: int = 1) -> None:
        """End the pause: draft for a trial at least, and pause for the shortest time if the trial fails.

        The sums are kept: they decay with every block, and have decayed at the pause.
        """
        self._pause_left, self._next_pause = 0, self.MIN_PAUSE
        self._drafts_left = max(self._drafts_left, self.TRIAL, drafts)

    @override
    def save(self) -> AdaptiveSpeculationState:
        return AdaptiveSpeculationState(
            self._emitted, self._plain, self._drafts_left, self._pause_left, self._next_pause
        )

    @override
    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        self._emitted, self._plain, self._drafts_left, self._pause_left, self._next_pause = reader.decode(
            AdaptiveSpeculationState, saved
        )
