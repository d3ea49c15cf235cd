"""A detector of falls that needs no unit: deviations are counted in standard deviations of the recent past."""

FADING = 0.03  # weight of the newest value in mean and variance: a memory of about 33 prompts
IGNORED = 0.5  # standard deviations below the mean that count as none
LARGEST = 3.0  # a single value counts no more standard deviations
LEAST_DEVIATION = 0.02  # of a share: the smallest standard deviation that is assumed


class FallDetector:
    """Cumulative sum of how far values lie below their recent mean (Page's test), in standard deviations.

    The variance is that of neighbouring values' differences, so that a slow rise, as of a drafter that learns, neither
    widens it nor hides a later fall.

    >>> detector = FallDetector(threshold=7.0, grace=10)
    >>> values = [0.40, 0.50] * 20 + [0.25, 0.30] * 10
    >>> found = []
    >>> for number, value in enumerate(values):
    ...     detector.update(value)
    ...     found += [number] * detector.drift_detected
    >>> found[0]  # the fall begins at 40
    43

    Args:
        threshold: sum that raises an alarm.
        grace: values before the first possible alarm.
    """

    def __init__(self, threshold: float, grace: int) -> None:
        self._threshold, self._grace = threshold, grace
        self._count, self._mean, self._variance, self._sum = 0, 0.0, 0.0, 0.0
        self._previous: float | None = None

    @property
    def drift_detected(self) -> bool:
        """Whether the sum is above the threshold."""
        return self._sum > self._threshold

    def update(self, x: float) -> None:
        """Compare a value with those before it, then add it to them."""
        if self._count >= self._grace:
            below = (self._mean - x) / max(self._variance**0.5, LEAST_DEVIATION)
            self._sum = max(0.0, self._sum + min(below, LARGEST) - IGNORED)
        self._count += 1
        self._mean += max(FADING, 1 / self._count) * (x - self._mean)
        if self._previous is not None:
            weight = max(FADING, 1 / (self._count - 1))
            self._variance += weight * ((x - self._previous) ** 2 / 2 - self._variance)
        self._previous = x
