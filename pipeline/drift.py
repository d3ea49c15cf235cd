"""Noticing that the stream has changed: the only file that imports `river`.

The detector sees one mean per prompt, because tokens inside a prompt are not independent; a prompt with nothing judged
is skipped, because one NaN disables ADWIN for good. ADWIN also alarms on improvements, which call for nothing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from river.drift import ADWIN, NoDrift, PageHinkley

from pipeline.config_sections import DriftSettings
from store.events import Drifted, PromptCompleted

RECENT = 8  # prompts whose mean is "after", for detectors that keep no window


class Detector(Protocol):
    """river's interface, as far as it is used."""

    drift_detected: bool

    def update(self, x: float) -> None:
        """Add one value."""
        ...


def make_detector(settings: DriftSettings) -> Detector:
    """A fresh detector as configured."""
    if settings.detector == "adwin":
        return ADWIN(delta=settings.delta, clock=1, grace_period=settings.grace)
    if settings.detector == "page-hinkley":
        return PageHinkley(
            min_instances=settings.grace, delta=settings.tolerance, threshold=settings.threshold, mode="down"
        )
    return NoDrift()


@dataclass(frozen=True)
class Rates:
    """Which of a prompt's counts the detector is fed."""

    first_only: bool

    def of(self, prompt: PromptCompleted) -> float | None:
        """Accepted over judged; with `first_only`, of the first proposal of each block alone. None if none was judged.

        With an adaptive draft length the mix of positions moves by itself; the first position is always there.
        """
        judged, accepted = prompt.judged, prompt.accepted
        if self.first_only:
            judged, accepted = prompt.first_judged, prompt.first_accepted
        return accepted / judged if judged else None


class DriftWatch:
    """Turns completed prompts into drift events.

    Args:
        settings: the detector and its parameters.
        rates: what the detector is fed.
    """

    def __init__(self, settings: DriftSettings, rates: Rates) -> None:
        self._settings, self._rates = settings, rates
        self._detector = make_detector(settings)
        self._since_alarm: deque[float] = deque(maxlen=4096)
        self._quiet = 0  # prompts for which a fall is not acted upon

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        """Add one prompt. An event when the detector alarms; its `action` says what is to be done."""
        self._quiet = max(0, self._quiet - 1)
        rate = self._rates.of(prompt)
        if rate is None:
            return None
        self._since_alarm.append(rate)
        self._detector.update(rate)
        return self._alarm(prompt) if self._detector.drift_detected else None

    def _alarm(self, prompt: PromptCompleted) -> Drifted:
        before, after = self._split(list(self._since_alarm))
        direction = "fall" if after < before else "rise"
        action = "ignored" if direction == "rise" else "cooldown" if self._quiet else "reset"
        if action == "reset":
            self._quiet = self._settings.cooldown
        for _ in range(len(self._since_alarm) - min(len(self._since_alarm), self._window())):
            self._since_alarm.popleft()
        return Drifted(
            offset=prompt.offset,
            dataset=prompt.dataset,
            detector=self._settings.detector,
            direction=direction,
            rate_before=before,
            rate_after=after,
            action=action,
        )

    def _window(self) -> int:
        """How many of the last values the detector takes for the present."""
        return max(1, int(getattr(self._detector, "width", RECENT)))

    def _split(self, rates: Sequence[float]) -> tuple[float, float]:
        recent = min(self._window(), len(rates) - 1) or 1
        return fmean(rates[:-recent] or rates), fmean(rates[-recent:])
