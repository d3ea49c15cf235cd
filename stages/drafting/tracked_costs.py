"""Costs of passes, kept up to date by what blocks take."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from stages.contract.snapshot import State
from stages.drafting.costs import BlockTimes, CostModel, Costs, Curve, make_monotone

DECAY = 0.98  # of all sums, per block: costs of drafts that are no longer made are forgotten
PRIOR_BLOCKS = 4.0  # weight of the line in the mean of one size, and of the costs at the beginning in the line
PRIOR_PIECES = 10.0  # of prompts that the drafter read at no cost
LEAST_PRIOR = 0.02  # what remains of the latter weight, so that the line has a slope where all passes have one size
ENOUGH = 2.0  # weight of recent drafts with which their cost counts as seen
LARGEST_JUMP = 2.0  # of a block over what was expected: beyond it, the block was interrupted or the first of its kind

Points = Iterable[tuple[float, float]]


@dataclass
class _Mean:
    """A mean with exponentially decaying weights."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.total, self.weight = DECAY * self.total + weight * value, DECAY * self.weight + weight

    @property
    def value(self) -> float:
        """The mean; 0 before the first value."""
        return self.total / self.weight if self.weight else 0.0

    def shrunk_to(self, prior: float, weight: float = PRIOR_BLOCKS) -> float:
        """Return the mean as if `prior` had been added with a weight."""
        return (self.total + weight * prior) / (self.weight + weight)


@dataclass
class _Line:
    """A line y = fixed + slope * x by least squares with exponentially decaying weights."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        values = (1.0, x, y, x * x, x * y)
        self.weight, self.x, self.y, self.xx, self.xy = (
            DECAY * old + weight * new for old, new in zip(self.sums, values, strict=True)
        )

    @property
    def sums(self) -> tuple[float, float, float, float, float]:
        """The decayed sums of 1, x, y, x squared and x y."""
        return self.weight, self.x, self.y, self.xx, self.xy

    def with_points(self, points: Points, weight: float) -> "_Line":
        """Return a line for which each of these points was seen with a weight, too."""
        line = _Line(*self.sums)
        for x, y in points:
            values = (1.0, x, y, x * x, x * y)
            line = _Line(*(old + weight * new for old, new in zip(line.sums, values, strict=True)))
        return line

    def fit(self) -> tuple[float, float]:
        """Return `fixed` and `slope`; there are two values of x at least."""
        slope = (self.weight * self.xy - self.x * self.y) / (self.weight * self.xx - self.x * self.x)
        return (self.y - slope * self.x) / self.weight, slope

    def fit_costs(self) -> tuple[float, float]:
        """Return the best `fixed` and `slope` of which neither is negative."""
        fixed, slope = self.fit()
        if slope < 0:
            return self.y / self.weight, 0.0
        return (fixed, slope) if fixed >= 0 else (0.0, self.xy / self.xx)


class TrackedCosts(CostModel):
    """Costs that were measured when the run began, corrected by the seconds of its blocks.

    Passes over some numbers of tokens are frequent; others are never made, or no longer, because they were measured
    while the machine was busy. So what passes take beyond the costs at the beginning is followed in two ways: by a line
    over all numbers of tokens, and at each point of the curve by a mean of the passes around it, shrunk to the line.
    What surrounds the pass belongs to the cost of a block, and is the same for all numbers of tokens. A draft of the
    model has a cost of its own, whatever its length: the drafter reads what it missed, and its pieces are translated
    and compared, by which verifying them takes longer than a tree of as many tokens. It is followed in target passes,
    which take longer on a busy machine, too, and returns to the lowest so far while the model does not draft: so what
    was learned on a busy machine does not last. Only ratios count, so the unit may change with the first block.

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
        start: the costs at the beginning, in seconds or a larger unit.
    """

    def __init__(self, start: Costs) -> None:
        self._given = start
        self._start = self._now = replace(start, around=0.0, per_draft=0.0)  # these are learned with the first blocks
        self._all = _Mean()  # of measured over predicted
        self._around = _Mean()  # of seconds without a draft of the model
        self._passes = _Line()  # seconds beyond the costs at the beginning, in today's unit, by the tokens of passes
        self._points = [_Mean() for _ in start.target]  # of measured over predicted
        self._drafter = _Line()  # seconds beyond `_around` over `_all`, by predicted costs of passes, in first passes
        self._with_draft = _Mean()  # of seconds of verifying beyond the curve, in blocks with a draft of the model
        self._without = _Mean()  # the same in other blocks
        self._prompts = _Mean()  # seconds over `_all` per piece of the prompts that the drafter read
        self._prior = 1.0  # weight of the costs at the beginning: decays
        self._lowest = 1.0  # cost of drafts so far, as a share of that at the beginning
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
    def prompt_cost(self, pieces: int) -> float:
        return self._prompts.shrunk_to(0.0, PRIOR_PIECES) * self._all.value * pieces

    @override
    def observe(self, block: BlockTimes) -> None:
        """Correct the costs by one block. Blocks in which the target reads prompts are left out by the caller: they
        show nothing of the cost of a token.
        """
        drafts = any(block.lengths)
        predicted = self._start.verification_cost(block.tokens)
        ratio = _limit(block.verifying / predicted, self._all.value or 1.0)
        if self._all.weight:  # else the curve has another unit
            beyond = ratio * predicted - self._now.verification_cost(block.tokens)
            self._with_draft.add(beyond, float(drafts))
            self._without.add(beyond, float(not drafts))
        self._all.add(ratio, 1.0)
        self._passes.add(block.tokens, (ratio - self._all.value) * predicted)
        near = dict(self._nearest_points(block.tokens))
        for place, mean in enumerate(self._points):
            mean.add(ratio, near.get(place, 0.0))
        seconds = block.drafting + block.around
        if drafts:
            more = _limit(seconds, self.drafts_cost(block.lengths) + self._around.value) - self._around.value
            passes = self._start.drafts_cost(block.lengths) / self._start.drafting_cost(1)
            self._drafter.add(passes, more / self._all.value, 1 / passes)  # what disturbs them grows with them
        else:
            self._around.add(_limit(seconds, self._around.value), 1.0)
            self._drafter.add(0.0, 0.0, 0.0)  # decays
        if prompts := block.prompts.pieces:
            self._prompts.add(block.prompts.seconds / self._all.value / prompts, prompts)
        else:
            self._prompts.add(0.0, 0.0)  # decays
        self._prior *= DECAY
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
        unit = self._all.value  # of the costs at the beginning
        weight = PRIOR_BLOCKS * max(self._prior, LEAST_PRIOR)
        curve = self._start.target
        unchanged = [(size, 0.0) for size in (curve[0][0], curve[0][0] + 1)]
        fixed, slope = self._passes.with_points(unchanged, weight / len(unchanged)).fit()
        target = [
            (size, cost * mean.shrunk_to(unit + (fixed + slope * size) / cost))
            for (size, cost), mean in zip(curve, self._points, strict=True)
        ]
        first = self._start.drafting_cost(1)
        drafts = [(passes, passes * first * self._lowest) for passes in (1, 3)]
        fixed, slope = self._drafter.with_points(drafts, weight / 4).fit_costs()
        if self._drafter.weight > ENOUGH:
            self._lowest = min(self._lowest, (fixed + 2 * slope) / (2 * first))
        without = self._without.value
        self._per_draft = fixed * unit + max(0.0, self._with_draft.shrunk_to(without) - without)
        drafter = tuple((rows, cost / first * slope * unit) for rows, cost in self._start.drafter)
        self._now = Costs(make_monotone(target), drafter)

    @override
    def state_dict(self) -> State:
        return {
            "means": {name: (mean.total, mean.weight) for name, mean in self._means.items()},
            "points": [(mean.total, mean.weight) for mean in self._points],
            "drafter": self._drafter.sums,
            "passes": self._passes.sums,
            "prior": self._prior,
            "lowest": self._lowest,
        }

    @property
    def _means(self) -> dict[str, _Mean]:
        names = ("_all", "_around", "_with_draft", "_without", "_prompts")
        return {name.lstrip("_"): getattr(self, name) for name in names}

    @override
    def load_state_dict(self, state: State) -> None:
        for name, mean in self._means.items():
            mean.total, mean.weight = state["means"][name]
        self._points = [_Mean(*sums) for sums in state["points"]]
        self._drafter, self._passes = _Line(*state["drafter"]), _Line(*state["passes"])
        self._prior, self._lowest = state["prior"], state["lowest"]
        if self._all.weight:
            self._correct()


def _limit(value: float, expected: float) -> float:
    return min(value, LARGEST_JUMP * expected) if expected else value
