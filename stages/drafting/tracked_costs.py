"""Costs of passes, kept up to date by what blocks take."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from stages.contract.snapshot import Saved, SnapshotReader
from stages.drafting.costs import BlockTimes, CostModel, Costs, Curve, make_monotone

DECAY = 0.98  # of a mean's weight, per block
PRIOR_BLOCKS = 4.0  # weight of the mean over all target passes in that of one size
LARGEST_JUMP = 2.0  # a block that took this many times more than expected was interrupted: it counts as that


@dataclass
class _Mean:
    """A mean with exponentially decaying weights."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        decay = DECAY**weight
        self.total, self.weight = decay * self.total + weight * value, decay * self.weight + weight

    @property
    def value(self) -> float:
        """The mean; 0 before the first value."""
        return self.total / self.weight if self.weight else 0.0

    def shrunk_to(self, prior: float) -> float:
        """Return the mean as if `prior` had been added `PRIOR_BLOCKS` times."""
        return (self.total + PRIOR_BLOCKS * prior) / (self.weight + PRIOR_BLOCKS)


@dataclass
class _Line:
    """A line y = fixed + slope * x by least squares with exponentially decaying weights."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        values = (1.0, x, y, x * x, x * y)
        self.weight, self.x, self.y, self.xx, self.xy = (
            DECAY * old + new for old, new in zip(self.sums, values, strict=True)
        )

    @property
    def sums(self) -> tuple[float, float, float, float, float]:
        """The decayed sums of 1, x, y, x squared and x y."""
        return self.weight, self.x, self.y, self.xx, self.xy

    def fit(self, prior: float) -> tuple[float, float]:
        """Return `fixed` and `slope`, neither negative, as if y = prior * x had been seen at x = 1 and x = 3."""
        weight, x, y, xx, xy = self.weight + 2, self.x + 4, self.y + 4 * prior, self.xx + 10, self.xy + 10 * prior
        slope = max(0.0, (weight * xy - x * y) / (weight * xx - x * x))
        fixed = (y - slope * x) / weight
        return (fixed, slope) if fixed >= 0 else (0.0, xy / xx)


@dataclass(frozen=True)
class TrackedCostsState:
    """Saved state of `TrackedCosts`: total and weight of its means, those of the points in the order of the curve, and
    the sums of the drafter's line. Checkpoints of older releases have two numbers in `drafter`, and no `around`.
    """

    all_passes: tuple[float, float]
    drafter: tuple[float, ...]
    points: list[tuple[float, float]]
    around: tuple[float, float] = (0.0, 0.0)


class TrackedCosts(CostModel):
    """Costs that were measured when the run began, corrected by the seconds of its blocks.

    A target pass that took twice as long as predicted raises the costs around its number of tokens and, less, all
    others: most of what slows a machine slows all passes. What surrounds the pass belongs to the cost of a block, and
    is the same for all numbers of tokens. A draft of the model has a cost of its own, whatever its length: the drafter
    reads what it missed, and its pieces are translated and compared. Only ratios count, so the unit may change with the
    first block.

    >>> costs = TrackedCosts(Costs(target=((1, 1.0), (5, 1.0)), drafter=((1, 0.1),)))
    >>> for _ in range(200):
    ...     costs.observe(BlockTimes(lengths=[0], tokens=1, drafting=0.0, verifying=0.010))
    ...     costs.observe(BlockTimes(lengths=[0], tokens=5, drafting=0.0, verifying=0.015))
    >>> round(costs.verification_cost(5) / costs.verification_cost(1), 1)
    1.5

    Drafts of 1 and 3 pieces take 4 and 6 ms: 3 ms and 1 for each piece.

    >>> for _ in range(200):
    ...     costs.observe(BlockTimes(lengths=[1], tokens=1, drafting=0.004, verifying=0.010))
    ...     costs.observe(BlockTimes(lengths=[3], tokens=1, drafting=0.006, verifying=0.010))
    >>> round(costs.drafts_cost([2]), 3), round(costs.drafting_cost(1), 3)
    (0.005, 0.001)

    Args:
        start: the costs at the beginning, in any unit.
    """

    def __init__(self, start: Costs) -> None:
        self._given = start
        self._start = self._now = replace(start, around=0.0, per_draft=0.0)  # these are learned with the first blocks
        self._all, self._around = (
            _Mean(),
            _Mean(),
        )  # of measured over predicted; of seconds without a draft of the model
        self._points = [_Mean() for _ in start.target]
        self._drafter = _Line()  # seconds beyond `_around` by predicted costs of the drafter's passes, in first passes
        self._per_draft = 0.0

    @property
    def start(self) -> Costs:
        """The costs at the beginning."""
        return self._given

    @override
    def verification_curve(self) -> tuple[Curve, float]:
        return self._now.target, self._around.value

    @override
    def drafting_cost(self, rows: int) -> float:
        return self._now.drafting_cost(rows)

    @override
    def drafts_cost(self, lengths: Sequence[int]) -> float:
        return self._now.drafts_cost(lengths) + (self._per_draft if any(lengths) else 0.0)

    @override
    def observe(self, block: BlockTimes) -> None:
        """Correct the costs by one block. Blocks that read prompts are left out by the caller: they show nothing of the
        cost of a token.
        """
        ratio = _limit(block.verifying / self._start.verification_cost(block.tokens), self._all.value)
        self._all.add(ratio, 1.0)
        for place, weight in self._nearest_points(block.tokens):
            self._points[place].add(ratio, weight)
        seconds = block.drafting + block.around
        if any(block.lengths):
            more = _limit(seconds, self.drafts_cost(block.lengths) + self._around.value if self._drafter.weight else 0)
            passes = self._start.drafts_cost(block.lengths) / self._start.drafting_cost(1)
            self._drafter.add(passes, more - self._around.value)
        else:
            self._around.add(_limit(seconds, self._around.value), 1.0)
        self._correct()

    def _nearest_points(self, tokens: int) -> list[tuple[int, float]]:
        """Return the one or two points of the target's curve around this number of tokens, with weights of sum 1."""
        sizes = [size for size, _ in self._start.target]
        after = bisect_left(sizes, tokens)
        if after == 0 or after == len(sizes):
            return [(min(after, len(sizes) - 1), 1.0)]
        share = (tokens - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return [(after - 1, 1 - share), (after, share)]

    def _correct(self) -> None:
        overall = self._all.value
        target = [
            (size, cost * mean.shrunk_to(overall))
            for (size, cost), mean in zip(self._start.target, self._points, strict=True)
        ]
        first = self._start.drafting_cost(1)
        self._per_draft, slope = self._drafter.fit(overall * first)
        drafter = tuple((rows, cost / first * slope) for rows, cost in self._start.drafter)
        self._now = Costs(make_monotone(target), drafter)

    @override
    def save(self) -> TrackedCostsState:
        all_passes, around, *points = [(mean.total, mean.weight) for mean in (self._all, self._around, *self._points)]
        return TrackedCostsState(all_passes, self._drafter.sums, points, around)

    @override
    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        if saved is None:  # the checkpoint of a run whose costs were not tracked
            return
        state = reader.decode(TrackedCostsState, saved)
        self._all, self._around = _Mean(*state.all_passes), _Mean(*state.around)
        self._drafter = _Line(*state.drafter) if len(state.drafter) > 2 else _Line()
        self._points = [_Mean(*one) for one in state.points]
        if self._all.weight:
            self._correct()


def _limit(value: float, expected: float) -> float:
    return min(value, LARGEST_JUMP * expected) if expected else value
