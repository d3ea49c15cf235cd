"""Noticing that the stream has changed: the only file that imports `river`.

The detector sees one mean per prompt, because tokens inside a prompt are not independent; a prompt with nothing judged
is skipped, because one NaN disables ADWIN for good. ADWIN also alarms on improvements, which call for nothing.

An alarm says that something changed, not where: ADWIN's own window still holds most of what came before. The place is
taken to be the split of the recent rates that tells its two sides apart best, and a fresh detector goes on from there.
(The best split of *all* rates since the last change misled: while the drafter learns, it is the slow rise long ago.)
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from river.drift import ADWIN, NoDrift, PageHinkley

from pipeline.config_sections import DriftSettings
from store.events import Drifted, PromptCompleted

MEMORY = 4096  # prompts since the last change that are looked at
RECENT = 64  # of them, those among which the change is looked for


class Detector(Protocol):
    """river's interface, as far as it is used."""

    @property
    def drift_detected(self) -> bool:
        """Whether the last value raised the alarm."""
        ...

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
        self._since_change: deque[tuple[int, float]] = deque(maxlen=MEMORY)  # offset and rate
        self._quiet = 0  # prompts for which a fall is not acted upon

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        """Add one prompt. An event when the detector alarms; its `action` says what is to be done."""
        self._quiet = max(0, self._quiet - 1)
        rate = self._rates.of(prompt)
        if rate is None:
            return None
        self._add(prompt.offset, rate)
        return self._alarm(prompt) if self._detector.drift_detected else None

    def _add(self, offset: int, rate: float) -> None:
        self._since_change.append((offset, rate))
        self._detector.update(rate)

    def _alarm(self, prompt: PromptCompleted) -> Drifted:
        rates = [rate for _, rate in self._since_change]
        change = max(0, len(rates) - RECENT) + change_point(rates[-RECENT:])
        before, after = fmean(rates[:change]), fmean(rates[change:])
        direction = "fall" if after < before else "rise"
        action = "ignored" if direction == "rise" else "cooldown" if self._quiet else self._settings.answer
        if action == self._settings.answer:
            self._quiet = self._settings.cooldown
        since = list(self._since_change)[change:]
        self._begin_anew(since)
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

    def _begin_anew(self, rates: Sequence[tuple[int, float]]) -> None:
        """A fresh detector that knows only these prompts' rates."""
        self._detector = make_detector(self._settings)
        self._since_change.clear()
        for offset, rate in rates:
            self._add(offset, rate)


def change_point(rates: Sequence[float]) -> int:
    """Where rates fall apart best: both sides' squared distances from their own means are least together.

    >>> change_point([0.8, 0.9, 0.8, 0.3, 0.2])
    3
    """
    total, left = sum(rates), 0.0
    best, place = -1.0, 1
    for number, rate in enumerate(rates[:-1], 1):
        left += rate
        distance = left / number - (total - left) / (len(rates) - number)
        explained = number * (len(rates) - number) * distance**2
        if explained > best:
            best, place = explained, number
    return place
