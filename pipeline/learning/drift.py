"""Drift detection on the share of tokens that were drafted, or on the acceptance rate: the only file that imports
`river`.

The detector receives one value per prompt, because tokens of one prompt are not independent. A prompt without a value
is skipped, because one NaN disables ADWIN permanently. ADWIN also alarms on improvements, which need no response.

An alarm does not reveal when the change happened: ADWIN's window still holds most of the older values. The change point
is estimated as the split of the recent rates that separates its two sides best, and a new detector continues from
there. (The best split of *all* rates since the last change was misleading: while the drafter learns, it is an old slow
rise.)
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol

from river.drift import ADWIN, NoDrift, PageHinkley

from pipeline.config.sections import DriftSettings
from pipeline.learning.fall_detector import FallDetector
from store.events import Drifted, PromptCompleted

MEMORY = 4096  # rates kept since the last change
RECENT = 64  # newest of these, in which the change point is searched


class Detector(Protocol):
    """The part of river's detector interface that is used."""

    @property
    def drift_detected(self) -> bool:
        """Whether the last value raised an alarm."""
        ...

    def update(self, x: float) -> None:
        """Add the value of one prompt."""
        ...


def make_detector(settings: DriftSettings) -> Detector:
    """Return a new detector as configured."""
    if settings.detector == "fall":
        return FallDetector(settings.deviations, settings.grace)
    if settings.detector == "adwin":
        return ADWIN(delta=settings.delta, clock=1, grace_period=settings.grace)
    if settings.detector == "page-hinkley":
        return PageHinkley(
            min_instances=settings.grace, delta=settings.tolerance, threshold=settings.threshold, mode="down"
        )
    return NoDrift()


Signal = Literal["drafted", "judged", "first"]


@dataclass(frozen=True)
class Rates:
    """Selects the value of a prompt that the detector receives.

    Attributes:
        signal: "drafted": share of the emitted tokens that came from drafts, whatever drafted them; it exists for every
            prompt. "judged": accepted over judged, of the model's drafts. "first": the same, of the first proposal of
            each block.
    """

    signal: Signal

    def read(self, prompt: PromptCompleted) -> float | None:
        """Return the value, from 0 to 1; None if there is none.

        With an adaptive draft length the mix of positions changes without drift, and later positions are accepted less
        often. The first position is in every draft, hence "first".
        """
        if self.signal == "drafted":
            return max(0.0, 1 - prompt.blocks / prompt.emitted) if prompt.emitted else None
        judged, accepted = prompt.judged, prompt.accepted
        if self.signal == "first":
            judged, accepted = prompt.first_judged, prompt.first_accepted
        return accepted / judged if judged else None


class DriftMonitor:
    """Turns completed prompts into drift events.

    Args:
        settings: the detector and its parameters.
        rates: selects the detector's input.
    """

    def __init__(self, settings: DriftSettings, rates: Rates) -> None:
        self._settings, self._rates = settings, rates
        self._detector = make_detector(settings)
        self._since_change: deque[tuple[int, float]] = deque(maxlen=MEMORY)  # offset and rate
        self._quiet = 0  # prompts left of the cooldown

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        """Add one prompt. Returns an event if the detector alarms; its `action` is the response to take."""
        self._quiet = max(0, self._quiet - 1)
        rate = self._rates.read(prompt)
        if rate is None:
            return None
        self._add(prompt.offset, rate)
        return self._alarm(prompt) if self._detector.drift_detected else None

    def _add(self, offset: int, rate: float) -> None:
        self._since_change.append((offset, rate))
        self._detector.update(rate)

    def _alarm(self, prompt: PromptCompleted) -> Drifted:
        rates = [rate for _, rate in self._since_change]
        falls_only = self._settings.detector != "adwin"  # a detector of falls found one, even after a larger rise
        change = max(0, len(rates) - RECENT) + change_point(rates[-RECENT:], falls_only=falls_only)
        before, after = fmean(rates[:change]), fmean(rates[change:])
        direction = "fall" if after < before else "rise"
        action = "ignored" if direction == "rise" else "cooldown" if self._quiet else self._settings.answer
        if action == self._settings.answer:
            self._quiet = self._settings.cooldown
        since = list(self._since_change)[change:]
        self._restart(since)
        return Drifted(
            offset=prompt.offset,
            target=prompt.target,
            dataset=prompt.dataset,
            detector=self._settings.detector,
            direction=direction,
            changed_at=min(offset for offset, _ in since),
            rate_before=before,
            rate_after=after,
            action=action,
        )

    def _restart(self, rates: Sequence[tuple[int, float]]) -> None:
        """Replace the detector by a new one that has seen only these rates."""
        self._detector = make_detector(self._settings)
        self._since_change.clear()
        for offset, rate in rates:
            self._add(offset, rate)


def change_point(rates: Sequence[float], *, falls_only: bool = False) -> int:
    """Return the split of the rates with the least sum of squared distances from the means of its two sides.

    >>> change_point([0.8, 0.9, 0.8, 0.3, 0.2])
    3
    >>> rise_and_fall = [0.1, 0.8, 0.9, 0.8, 0.9, 0.3, 0.4]
    >>> change_point(rise_and_fall), change_point(rise_and_fall, falls_only=True)
    (1, 5)

    Args:
        rates: at least two.
        falls_only: only splits whose second side is lower; the last rate alone if there is none.
    """
    total, left = sum(rates), 0.0
    best, place = -1.0, len(rates) - 1 if falls_only else 1
    for number, rate in enumerate(rates[:-1], 1):
        left += rate
        distance = left / number - (total - left) / (len(rates) - number)
        if falls_only and distance <= 0:
            continue
        explained = number * (len(rates) - number) * distance**2
        if explained > best:
            best, place = explained, number
    return place
