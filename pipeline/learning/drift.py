"""Drift detection on the acceptance rate: the only file that imports `river`.

The detector is Page-Hinkley's test of falls. It receives one rate per prompt, because tokens of one prompt are not
independent: accepted over judged tokens of what the drafter model proposed. A prompt without such tokens has no rate.
(The rate over all sources does not fall: where the model's drafts fail, the memory and the own text draft instead.)

An alarm does not reveal when the change happened. The change point is estimated as the split of the recent rates that
separates a higher first side from a lower second one best, and a new detector continues from there. (The best split of
*all* rates since the last change was misleading: while the drafter learns, it is an old slow rise.)
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

from pipeline.config.sections import DriftSettings
from stages.engine.checkpoints.deferred_imports import defer_imports
from store.events import Drifted, PromptCompleted

MEMORY = 4096  # rates kept since the last change
THRESHOLD, TOLERANCE = 1.25, 0.15  # cumulative deviation that is an alarm, and the deviation per prompt that is ignored
GRACE = 10  # prompts before the first possible alarm: fewer say nothing of what is usual
COOLDOWN = 20  # prompts after a response in which drift is only logged: it has not had its effect yet
RECENT = 64  # newest of these, in which the change point is searched
RESPONSES = {  # by what an event calls them
    "reset": "the acceptance head is reset",
    "recall": "the acceptance head is reset, and earlier versions are compared",
    "cooldown": "no response so soon after the last one",
    "none": "no response",
}


class Detector(Protocol):
    """The part of river's detector interface that is used."""

    @property
    def drift_detected(self) -> bool:
        """Whether the last value raised an alarm."""
        ...

    def update(self, x: float) -> None:
        """Add the value of one prompt."""
        ...


def make_detector(name: str) -> Detector:
    """Return a new detector as configured."""
    with defer_imports("river.drift.datasets", "scipy.stats"):  # 0.7 s of 0.8, and 110 MB
        from river.drift import NoDrift, PageHinkley

    if name == "page-hinkley":
        return PageHinkley(min_instances=GRACE, delta=TOLERANCE, threshold=THRESHOLD, mode="down")
    return NoDrift()


class DriftMonitor:
    """Turns completed prompts into drift events."""

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self._rates: deque[tuple[int, float]] = deque(maxlen=MEMORY)  # offset and rate, since the last change
        self._detector = make_detector(settings.detector)
        self._cooldown = COOLDOWN
        self._quiet = 0  # prompts left of the cooldown

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        """Add one prompt. Returns an event if the detector alarms; its `action` is the response to take."""
        self._quiet = max(0, self._quiet - 1)
        if not prompt.judged:
            return None
        self._add(prompt.offset, prompt.accepted / prompt.judged)
        return self._alarm(prompt) if self._detector.drift_detected else None

    def _add(self, offset: int, rate: float) -> None:
        self._rates.append((offset, rate))
        self._detector.update(rate)

    def _alarm(self, prompt: PromptCompleted) -> Drifted:
        rates = [rate for _, rate in self._rates]
        change = max(0, len(rates) - RECENT) + change_point(rates[-RECENT:])
        before, after = fmean(rates[:change]), fmean(rates[change:])
        action = "cooldown" if self._quiet else self._settings.response
        if not self._quiet:
            self._quiet = self._cooldown
        since = list(self._rates)[change:]
        self._detector = make_detector(self._settings.detector)
        self._rates.clear()
        for offset, rate in since:
            self._add(offset, rate)
        changed_at = min(offset for offset, _ in since)
        fall = f"acceptance fell from {before:.2f} to {after:.2f} at prompt {changed_at}"
        return Drifted(
            offset=prompt.offset,
            target=prompt.target,
            dataset=prompt.dataset,
            detector=self._settings.detector,
            changed_at=changed_at,
            rate_before=before,
            rate_after=after,
            action=action,
            description=f"drift at prompt {prompt.offset} ({prompt.dataset}): {fall}; {RESPONSES[action]}",
        )


def change_point(rates: Sequence[float]) -> int:
    """Return the split of the rates with the least sum of squared distances from the means of its two sides, among
    those whose second side is lower; the last rate alone if there is none.

    >>> change_point([0.8, 0.9, 0.8, 0.3, 0.2])
    3
    >>> change_point([0.1, 0.8, 0.9, 0.8, 0.9, 0.3, 0.4])  # not the larger rise
    5

    Args:
        rates: at least two.
    """
    total, left = sum(rates), 0.0
    best, place = -1.0, len(rates) - 1
    for number, rate in enumerate(rates[:-1], 1):
        left += rate
        distance = left / number - (total - left) / (len(rates) - number)
        explained = number * (len(rates) - number) * distance**2
        if distance > 0 and explained > best:
            best, place = explained, number
    return place
