"""How long drafts are: whether a block drafts at all, and which rows draft one more piece."""

from collections.abc import Sequence
from typing import Protocol

from stages.costs import Costs
from stages.snapshot import Json

Survival = Sequence[float]  # per drafted piece the estimated probability that it and all before it are accepted


class StopRule(Protocol):
    """Which rows draft one more piece. Pure."""

    def going_on(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        """Asked after every pass of a block.

        Args:
            survivals: of every row's draft so far; empty for a row that did not draft.
            open_rows: the rows that may draft on, at least one piece each so far.

        Returns:
            those of them that do.
        """
        ...


class FixedLength:
    """Draft to the limit."""

    def going_on(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        """All."""
        return open_rows


class ThresholdStop:
    """The paper's rule (equation 7): stop when the chance of a rejection exceeds `threshold`."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def going_on(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        """Those for which 1 - prod a_i is at most the threshold."""
        return [row for row in open_rows if 1 - survivals[row][-1] <= self._threshold]


class CostStop:
    """Go on while one more pass is expected to raise the tokens emitted per unit of time, of all rows together.

    A block of drafts emits about the number of rows plus all survivals. The next piece's own chance is not known yet;
    the last one's stands in for it. A drafter pass is shared: the rows with the best hopes draft on, as many as pay.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def going_on(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        """The best so many, if any number of them raises the rate."""
        lengths = list(map(len, survivals))
        emitted, spent = len(survivals) + sum(map(sum, survivals)), self._costs.block(lengths)
        tokens = len(lengths) + sum(lengths)
        verifying = self._costs.verifying(tokens)
        hopeful = sorted(open_rows, key=lambda row: -_hope(survivals[row]))
        best, chosen, gained = emitted / spent, 0, 0.0
        for number, row in enumerate(hopeful, start=1):
            gained += _hope(survivals[row])
            more = self._costs.drafting(number) + self._costs.verifying(tokens + number) - verifying
            if (emitted + gained) / (spent + more) > best:
                best, chosen = (emitted + gained) / (spent + more), number
        return hopeful[:chosen]


def _hope(survival: Survival) -> float:
    """The survival to expect of the next piece."""
    before = survival[-2] if len(survival) > 1 else 1.0
    return survival[-1] * survival[-1] / before if before > 0 else 0.0


class Paying(Protocol):
    """Whether drafting pays at all. Asked once before each block, told once after it."""

    def drafts(self) -> bool:
        """Whether the next block drafts."""
        ...

    def observe(self, lengths: Sequence[int], emitted: int) -> None:
        """What became of the block: pieces drafted per row, and tokens emitted by all rows."""
        ...

    def save(self) -> Json:
        """See `stages.snapshot`."""
        ...

    def restore(self, saved: Json) -> None:
        """See `stages.snapshot`."""
        ...


class AlwaysDraft:
    """Draft in every block."""

    def drafts(self) -> bool:
        """Yes."""
        return True

    def observe(self, lengths: Sequence[int], emitted: int) -> None:
        """Nothing changes."""

    def save(self) -> Json:
        """Nothing to keep."""
        return None

    def restore(self, saved: Json) -> None:
        """Nothing was kept."""


class DraftWherePaying:
    """Compares the tokens per cost of recent drafting blocks with those of plain decoding; where plain decoding wins,
    nothing is drafted for a while, then a few blocks are tried again.

    Plain decoding emits one token per row and pass, so it needs no measuring. The first rest is short and doubles while
    trials fail: drafting that never pays costs the trials alone.

    Args:
        costs: of passes.
    """

    MEMORY = 0.95  # what each block leaves of the ones before it
    FADED = 0.1  # what a rest leaves of all evidence
    EVIDENCE = 16  # rows' blocks before the first judgement
    TRIAL, SHORTEST, LONGEST = 4, 32, 256  # rows' blocks tried; blocks of rest

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._emitted = self._plain = 0.0  # recent tokens, and what plain decoding would have emitted in the same time
        self._on = self.EVIDENCE  # rows' blocks still to draft before a judgement
        self._off = 0  # blocks still to rest
        self._rest = self.SHORTEST

    def drafts(self) -> bool:
        """See `Paying`."""
        return self._off == 0

    def observe(self, lengths: Sequence[int], emitted: int) -> None:
        """See `Paying`."""
        if self._off:
            self._off -= 1
            return
        rows = len(lengths)
        plain = rows * self._costs.block(lengths) / self._costs.verifying(rows)
        self._emitted = self._emitted * self.MEMORY + emitted
        self._plain = self._plain * self.MEMORY + plain
        self._on = max(0, self._on - rows)
        if self._on:
            return
        if self._emitted < self._plain:
            self._off, self._on = self._rest, self.TRIAL
            self._emitted *= self.FADED  # the trial after the rest shall decide, not what was before it
            self._plain *= self.FADED
            self._rest = min(self.LONGEST, 2 * self._rest)
        else:
            self._rest = self.SHORTEST

    def save(self) -> Json:
        """See `stages.snapshot`."""
        return [self._emitted, self._plain, self._on, self._off, self._rest]

    def restore(self, saved: Json) -> None:
        """See `stages.snapshot`."""
        self._emitted, self._plain, self._on, self._off, self._rest = saved
