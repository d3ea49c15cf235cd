"""Draft lengths: rules that select rows for one more piece."""

from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from stages.drafting.costs import CostModel, count_paying

Survival = Sequence[float]  # per drafted piece the estimated probability that it and all before it are accepted


class StopRule(Protocol):
    """Selects the rows that draft one more piece. Pure."""

    def select_rows(self, survivals: Sequence[Survival], open_rows: Sequence[int]) -> Sequence[int]:
        """Return the rows of `open_rows` that draft one more piece. Called after every drafter pass of a block."""
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

        def cost_of(count: int) -> float:
            more = self._costs.drafting_cost(count) + self._costs.verification_cost(tokens + count) - verifying
            return spent + (more if count else 0.0)

        gains = [_next_survival(survivals[row]) for row in ranked]
        return ranked[: count_paying(emitted, gains, cost_of)]


def _next_survival(survival: Survival) -> float:
    before = survival[-2] if len(survival) > 1 else 1.0
    return survival[-1] * survival[-1] / before if before > 0 else 0.0


def make_stop_rule(stop: str | float, costs: CostModel) -> StopRule:
    """Return the rule of the setting `draft.stop`."""
    if stop == "never":
        return FixedLength()
    return ThresholdStop(stop) if isinstance(stop, float) else CostStop(costs)
