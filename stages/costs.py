"""What drafting and verifying cost: the figures by which the draft length is chosen."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

Curve = tuple[tuple[int, float], ...]


def _at(curve: Curve, place: int) -> float:
    """Linear between the points and beyond the last, which go on as they ended; flat before the first."""
    if len(curve) == 1 or place <= curve[0][0]:
        return curve[0][1]
    after = min(max(1, bisect_left([x for x, _ in curve], place)), len(curve) - 1)
    (x, y), (far_x, far_y) = curve[after - 1], curve[after]
    return y + (far_y - y) * (place - x) / (far_x - x)


@dataclass(frozen=True)
class Costs:
    """Costs of passes, in seconds or in any other unit: only their ratios count.

    Attributes:
        target: (tokens read by all rows together, cost of the pass), tokens ascending.
        drafter: (rows that draft, cost of one piece for each of them), rows ascending.
    """

    target: Curve
    drafter: Curve

    def verifying(self, tokens: int) -> float:
        """Of a target pass that reads so many tokens."""
        return _at(self.target, tokens)

    def drafting(self, rows: int) -> float:
        """Of one more piece for so many rows."""
        return _at(self.drafter, rows)

    def block(self, lengths: Sequence[int]) -> float:
        """Of a block whose rows have drafts of these lengths."""
        passes = (sum(length > index for length in lengths) for index in range(max(lengths, default=0)))
        return self.verifying(len(lengths) + sum(lengths)) + sum(map(self.drafting, passes))


def rising(curve: Sequence[tuple[int, float]]) -> Curve:
    """The curve with measured falls levelled: more work does not cost less, what says so is noise."""
    found: list[tuple[int, float]] = []
    for place, cost in curve:
        found.append((place, max(cost, found[-1][1]) if found else cost))
    return tuple(found)
