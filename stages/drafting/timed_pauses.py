"""Pauses of all drafting, by the seconds that blocks take."""

from dataclasses import dataclass
from math import sqrt

from stages.contract.snapshot import State
from stages.drafting.costs import BlockTimes, CostModel

DRAFTING_BLOCKS, PLAIN_BLOCKS = 60, 5  # between two comparisons: blocks that draft, and blocks that do not
SECOND_PLAIN_BLOCKS = 17  # before the comparison that confirms another
SURE_AFTER, LONG_DRAFTING = 4, 252  # after so many comparisons without a pause, so many blocks draft between two
TRIAL = 33  # blocks of a trial: as many that draft, during a pause or before a comparison that confirms another
SHORTEST_PAUSE, LONGEST_PAUSE = 128, 1024  # blocks; a pause is twice as long as the one before it
DRAFTING_DECAY, PLAIN_DECAY = 0.995, 0.98  # of the sums, per block of the kind
PAUSE_DECAY = 0.25  # of the sums of drafting at a pause, so that the trial after it has most of the weight
DOUBT_DECAY = 0.05  # of all sums before a comparison that confirms another: it is to judge by blocks of its own
LARGEST_JUMP = 3.0  # a block that took this many times more than expected was interrupted: it counts as that


@dataclass
class _Speed:
    """Tokens that blocks of one kind emitted, and those that plain decoding was expected to emit in their time."""

    decay: float
    emitted: float = 0.0
    expected: float = 0.0

    def add(self, emitted: float, expected: float) -> None:
        self.emitted = self.decay * self.emitted + emitted
        self.expected = self.decay * self.expected + expected

    def weaken(self, factor: float) -> None:
        self.emitted, self.expected = factor * self.emitted, factor * self.expected

    @property
    def value(self) -> float:
        return self.emitted / self.expected


class TimedPauses:
    """Pauses all drafting, the search for trees included, while blocks without drafts emit more tokens per second.

    The costs of passes, from which drafts are chosen, leave out what surrounds a pass: the search for candidates, the
    decision on them, their records. So blocks of both kinds are timed as a whole, in stretches that take turns. While
    drafting is faster, few blocks are plain; while it is slower, trials become rare. Drafting is paused when it loses
    two comparisons in a row, the second one with more plain blocks: five blocks at the start of a run, while the
    machine still has other things to do, are little evidence. The first block of a stretch is not counted, because it
    records what the last stretch decided. Outside of a pause a block of N rows counts as sqrt(N) blocks of one row,
    because the tokens per second of N rows are so much more certain, and a trial that fails costs N rows.

    Plain decoding takes 10 ms a token. Blocks that draft take 13 ms for 1.2 tokens:

    >>> from stages.drafting.costs import Costs
    >>> pauses = TimedPauses(Costs(target=((1, 0.010), (5, 0.011)), drafter=((1, 0.1),)))
    >>> made = []
    >>> for _ in range(1000):
    ...     made.append(pauses.drafts)
    ...     tokens, seconds = (3, 0.013) if pauses.drafts else (1, 0.010)
    ...     pauses.observe(BlockTimes([0], tokens, 0.0, seconds), 1.2 if pauses.drafts else 1, drafts=pauses.drafts)
    >>> made.index(False), made[98:].index(False), sum(made[115:])
    (60, 0, 66)

    Which blocks draft depends on the clock, so that equal seeds give equal rows only where the same blocks draft. The
    text has the target's distribution in any case: the choice depends on past blocks only.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._drafting, self._plain = _Speed(DRAFTING_DECAY), _Speed(PLAIN_DECAY)
        self.paused, self.drafts = False, True
        self._left: float = DRAFTING_BLOCKS  # blocks of this stretch
        self._measured = False  # whether the last block was one of this stretch
        self._next_pause, self._comparisons = SHORTEST_PAUSE, 0
        self._doubted = False  # whether drafting was slower at the last comparison, which is to be confirmed

    def observe(self, block: BlockTimes, emitted: float, *, drafts: bool) -> None:
        """Count a block.

        Args:
            drafts: whether any row searched or drafted, or had its action drawn; in a pause, some may.
        """
        rows = len(block.lengths)
        if drafts is self.drafts and self._measured:
            foreseen = self._costs.verification_cost(block.tokens) + self._costs.drafts_cost(block.lengths)
            seconds = min(block.drafting + block.verifying + block.around, LARGEST_JUMP * foreseen)
            speed = self._drafting if drafts else self._plain
            speed.add(emitted, rows * seconds / self._costs.verification_cost(rows))
        self._measured = drafts is self.drafts
        in_pause = self.paused and not self.drafts
        self._left -= 1 if in_pause else sqrt(rows)
        if self._left <= 0:
            self._begin_stretch()

    def _begin_stretch(self) -> None:
        """Compare both kinds, if blocks of the second have just been timed, and begin the next stretch."""
        self._measured = False
        if self.drafts and not self.paused:
            self.drafts, self._left = False, SECOND_PLAIN_BLOCKS if self._doubted else PLAIN_BLOCKS
            return
        # Where many blocks are drawn, it may be that no plain one was timed.
        slower = self._plain.expected > 0 and self._drafting.value < self._plain.value
        if not self.drafts and self.paused:
            self.drafts, self._left = True, TRIAL
        elif slower and not self.paused and not self._doubted:
            self._drafting.weaken(DOUBT_DECAY)
            self._plain.weaken(DOUBT_DECAY)
            self._doubted, self.drafts, self._left = True, True, TRIAL
        elif slower:
            self._drafting.weaken(PAUSE_DECAY)
            self.paused, self.drafts, self._left, self._doubted = True, False, self._next_pause, False
            self._next_pause = min(LONGEST_PAUSE, 2 * self._next_pause)
        else:
            self._comparisons += 1
            self.paused, self.drafts, self._next_pause, self._doubted = False, True, SHORTEST_PAUSE, False
            self._left = LONG_DRAFTING if self._comparisons > SURE_AFTER else DRAFTING_BLOCKS

    def resume(self) -> None:
        """End a pause: make a trial now, and pause for the shortest time if it fails."""
        if self.paused and not self.drafts:
            self.drafts, self._left, self._measured = True, TRIAL, False
        self._next_pause = SHORTEST_PAUSE

    def state_dict(self) -> State:
        speeds = [(speed.emitted, speed.expected) for speed in (self._drafting, self._plain)]
        stretch = self.paused, self.drafts, self._left, self._measured
        return {"speeds": speeds, "stretch": stretch, "trials": (self._next_pause, self._comparisons, self._doubted)}

    def load_state_dict(self, state: State) -> None:
        for speed, sums in zip((self._drafting, self._plain), state["speeds"], strict=True):
            speed.emitted, speed.expected = sums
        self.paused, self.drafts, self._left, self._measured = state["stretch"]
        self._next_pause, self._comparisons, self._doubted = state["trials"]
