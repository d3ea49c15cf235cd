"""Costs of passes, kept up to date by what blocks take."""

from bisect import bisect_left
from dataclasses import dataclass

from typing_extensions import override

from stages.contract.snapshot import Saved, SnapshotReader
from stages.drafting.costs import BlockTimes, CostModel, Costs, make_monotone

DECAY = 0.98  # of a mean's weight, per block
PRIOR_BLOCKS = 4.0  # weight of the mean over all target passes in that of one size, and in the drafter's
LARGEST_JUMP = 2.0  # a block that took this many times more than the mean was interrupted: it counts as that


@dataclass
class _Mean:
    """A mean with exponentially decaying weights."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        decay = DECAY**weight
        self.total, self.weight = decay * self.total + weight * value, decay * self.weight + weight

    def shrunk_to(self, prior: float) -> float:
        """Return the mean as if `prior` had been added `PRIOR_BLOCKS` times."""
        return (self.total + PRIOR_BLOCKS * prior) / (self.weight + PRIOR_BLOCKS)


@dataclass(frozen=True)
class TrackedCostsState:
    """Saved state of `TrackedCosts`: total and weight of its means, those of the points in the order of the curve."""

    all_passes: tuple[float, float]
    drafter: tuple[float, float]
    points: list[tuple[float, float]]


class TrackedCosts(CostModel):
    """Costs that were measured when the run began, corrected by the seconds of its blocks.

    A target pass that took twice as long as predicted raises the costs around its number of tokens and, less, all
    others: most of what slows a machine slows all passes. Only ratios count, so the unit may change with the first
    block.

    >>> costs = TrackedCosts(Costs(target=((1, 1.0), (5, 1.0)), drafter=((1, 0.1),)))
    >>> for _ in range(200):
    ...     costs.observe(BlockTimes(lengths=[0], tokens=1, drafting=0.0, verifying=0.010))
    ...     costs.observe(BlockTimes(lengths=[0], tokens=5, drafting=0.0, verifying=0.015))
    >>> round(costs.verification_cost(5) / costs.verification_cost(1), 1)
    1.5

    Args:
        start: the costs at the beginning, in any unit.
    """

    def __init__(self, start: Costs) -> None:
        self._start = self._now = start
        self._all, self._drafter = _Mean(), _Mean()  # of measured over predicted
        self._points = [_Mean() for _ in start.target]

    @property
    def start(self) -> Costs:
        """The costs at the beginning."""
        return self._start

    @override
    def verification_cost(self, tokens: int) -> float:
        return self._now.verification_cost(tokens)

    @override
    def drafting_cost(self, rows: int) -> float:
        return self._now.drafting_cost(rows)

    @override
    def observe(self, block: BlockTimes) -> None:
        """Correct the costs by one block. Blocks that read prompts are left out by the caller: they show nothing of the
        cost of a token.
        """
        ratio = _limit(block.verifying / self._start.verification_cost(block.tokens), self._all)
        self._all.add(ratio, 1.0)
        for place, weight in self._nearest_points(block.tokens):
            self._points[place].add(ratio, weight)
        if any(block.lengths):
            ratio = block.drafting / self._start.drafts_cost(block.lengths)
            self._drafter.add(_limit(ratio, self._drafter), 1.0)
        self._now = self._correct()

    def _nearest_points(self, tokens: int) -> list[tuple[int, float]]:
        """Return the one or two points of the target's curve around this number of tokens, with weights of sum 1."""
        sizes = [size for size, _ in self._start.target]
        after = bisect_left(sizes, tokens)
        if after == 0 or after == len(sizes):
            return [(min(after, len(sizes) - 1), 1.0)]
        share = (tokens - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return [(after - 1, 1 - share), (after, share)]

    def _correct(self) -> Costs:
        overall = self._all.total / self._all.weight
        target = [
            (size, cost * mean.shrunk_to(overall))
            for (size, cost), mean in zip(self._start.target, self._points, strict=True)
        ]
        factor = self._drafter.shrunk_to(overall)
        return Costs(make_monotone(target), tuple((rows, cost * factor) for rows, cost in self._start.drafter))

    @override
    def save(self) -> TrackedCostsState:
        means = [(mean.total, mean.weight) for mean in (self._all, self._drafter, *self._points)]
        return TrackedCostsState(means[0], means[1], means[2:])

    @override
    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        if saved is None:  # the checkpoint of a run whose costs were not tracked
            return
        state = reader.decode(TrackedCostsState, saved)
        self._all, self._drafter = _Mean(*state.all_passes), _Mean(*state.drafter)
        self._points = [_Mean(*one) for one in state.points]
        if self._all.weight:
            self._now = self._correct()


def _limit(ratio: float, mean: _Mean) -> float:
    return min(ratio, LARGEST_JUMP * mean.total / mean.weight) if mean.weight else ratio
