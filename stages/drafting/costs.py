"""Costs of drafting and verifying, from which draft lengths are chosen."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from stages.contract.snapshot import State

Curve = tuple[tuple[int, float], ...]


def _interpolate(curve: Curve, x: float) -> float:
    """Interpolate linearly between the points, extrapolate the last segment; constant before the first point."""
    if len(curve) == 1 or x <= curve[0][0]:
        return curve[0][1]
    after = min(max(1, bisect_left(curve, x, key=itemgetter(0))), len(curve) - 1)
    (low, low_cost), (high, high_cost) = curve[after - 1], curve[after]
    return low_cost + (high_cost - low_cost) * (x - low) / (high - low)


class StageSeconds(NamedTuple):
    """What a block took, in seconds: drafting, verifying, and `around`, all else until its last record."""

    drafting: float
    verifying: float
    around: float = 0.0


class ReadPrompts(NamedTuple):
    """Prompts that the drafter read in a block, before its first drafts for their rows."""

    pieces: int = 0  # of all of them
    seconds: float = 0.0  # what reading them took
    measured: bool = True  # whether they were read in passes of their own, so that the seconds are known


class BlockTimes(NamedTuple):
    """What a block took."""

    lengths: Sequence[int]  # pieces drawn by the model, per row
    tokens: int  # read by the target, of all rows together
    # drafting, verifying, around: seconds, as in `StageSeconds`, without those of prompts
    drafting: float
    verifying: float
    around: float = 0.0
    prompts: ReadPrompts = ReadPrompts()  # those that the drafter read
    trees: int = 0  # rows with a tree of the own text or the memory


class VerificationCosts(Protocol):
    """Costs of the target's passes, in seconds or in any other unit. They may change from block to block."""

    def verification_cost(self, tokens: float) -> float:
        """Return the cost of a block without drafts of the model, whose target pass reads this many tokens."""
        points, around = self.verification_curve()
        return _interpolate(points, tokens) + around

    def verification_curve(self) -> tuple[Curve, float]:
        """Return the costs of target passes by their tokens, ascending, and what all else in a block costs."""
        ...


class CostModel(VerificationCosts, Protocol):
    """Predicts what passes cost, in one unit: only ratios count. Read in every block; `observe` is called after it."""

    def drafting_cost(self, rows: int) -> float:
        """Return the cost of a drafter pass with this many rows: one piece for each."""
        ...

    def drafts_cost(self, lengths: Sequence[int]) -> float:
        """Return what drafts of these lengths by the model, one per row, add to the cost of a block."""
        ordered = sorted(lengths)
        passes = range(ordered[-1] if ordered else 0)
        return sum(self.drafting_cost(len(ordered) - bisect_right(ordered, index)) for index in passes)

    def block_cost(self, lengths: Sequence[int]) -> float:
        """Return the cost of a block whose rows have drafts of these lengths."""
        return self.verification_cost(len(lengths) + sum(lengths)) + self.drafts_cost(lengths)

    def tree_cost(self) -> float:
        """Return what a row's tree of the own text or the memory costs beyond its tokens; by default nothing."""
        return 0.0

    def prompt_cost(self, pieces: int) -> float:
        """Return what it costs that the drafter reads a prompt of so many pieces; by default nothing is known of it."""
        return 0.0

    def observe(self, block: BlockTimes) -> None:
        """Update with what a block took. By default ignored."""
        return

    def state_dict(self) -> State:
        """Return the state for a checkpoint; by default there is none."""
        return None

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; by default there is none."""
        return


@dataclass(frozen=True)
class Costs(CostModel):
    """Costs of passes as they were measured or estimated once, in seconds or in any other unit.

    Two rows with drafts of 3 and 1 pieces: the target reads 2 + 4 tokens, the drafter runs 3 passes, of which the first
    has two rows. Between two points of a curve, and after the last, the cost is linear.

    >>> costs = Costs(target=((1, 10.0), (5, 14.0)), drafter=((1, 1.0), (2, 1.5)))
    >>> costs.verification_cost(3), costs.verification_cost(6), costs.drafting_cost(2)
    (12.0, 15.0, 1.5)
    >>> costs.block_cost([3, 1])  # 15 + 1.5 + 1 + 1
    18.5
    """

    target: Curve  # (tokens read by all rows together, cost of the pass), tokens ascending
    drafter: Curve  # (rows that draft, cost of one piece for each of them), rows ascending
    around: float = 0.0  # cost of all else in a block, whatever is drafted
    per_draft: float = 0.0  # cost of a draft of the model, whatever its length: it is translated and compared

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> "Costs":
        """Return the costs of JSON values, as `astuple` gives them."""
        target, drafter = (tuple((int(size), float(cost)) for size, cost in curve) for curve in values[:2])
        return cls(target, drafter, *map(float, values[2:]))

    @override
    def verification_curve(self) -> tuple[Curve, float]:
        return self.target, self.around

    @override
    def drafting_cost(self, rows: int) -> float:
        return _interpolate(self.drafter, rows)

    @override
    def drafts_cost(self, lengths: Sequence[int]) -> float:
        return super().drafts_cost(lengths) + (self.per_draft if any(lengths) else 0.0)


def count_paying(emitted: float, gains: Sequence[float], cost_of: Callable[[int], float]) -> int:
    """Return how many candidates give a block the highest expected tokens per cost: the rule of all that is drafted.

    A pass over one token costs 10, and each candidate 1 more. Two are worth it, a third is not:

    >>> count_paying(1.0, [0.6, 0.4, 0.1], lambda count: 10.0 + count)
    2

    Args:
        emitted: tokens expected without any of them.
        gains: what each adds to these, in descending order: the probability that it is emitted.
        cost_of: the cost of the block with the first so many.
    """
    best, paying = emitted / cost_of(0), 0
    for count, gain in enumerate(gains, start=1):
        emitted += gain
        if (rate := emitted / cost_of(count)) > best:
            best, paying = rate, count
    return paying


def make_monotone(curve: Sequence[tuple[int, float]]) -> Curve:
    """Lower each cost to the least of those of more work.

    What disturbs a measurement only adds to it. A few sizes do take longer than the next larger one; they are taken to
    cost as much as that.

    >>> make_monotone([(1, 30.0), (2, 38.0), (3, 31.0), (5, 32.0)])
    ((1, 30.0), (2, 31.0), (3, 31.0), (5, 32.0))
    """
    costs = list(accumulate((cost for _, cost in reversed(curve)), min))
    return tuple((size, cost) for (size, _), cost in zip(curve, reversed(costs), strict=True))
