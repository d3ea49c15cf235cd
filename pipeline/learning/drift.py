"""Drift detection on the acceptance rate, or on how common the tokens are: the only file that imports `river`.

A detector receives one value per prompt, because tokens of one prompt are not independent. A prompt without a value is
skipped, because one NaN disables ADWIN permanently. ADWIN also alarms on improvements, which need no response.

An alarm does not reveal when the change happened: ADWIN's window still holds most of the older values. The change point
is estimated as the split of the recent values that separates its two sides best, and a new detector continues from
there. (The best split of *all* values since the last change was misleading: while the drafter learns, it is an old slow
rise.)
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal, Protocol

from pipeline.config.sections import DriftSettings
from pipeline.learning.rank_detector import RankDetector
from store.events import Drifted, PromptCompleted

MEMORY = 4096  # values kept since the last change
ALARM_INTERVAL = 10_000.0  # prompts of an unchanged stream between two false alarms of "ranks": a day of a small server
THRESHOLD, TOLERANCE = 3.0, 0.05  # Page-Hinkley's cumulative deviation, and the deviation per prompt that it ignores
GRACE = 10  # prompts before the first possible alarm: fewer say nothing of what is usual
COOLDOWN = 20  # prompts after a response in which drift is only logged: it has not had its effect yet
RECENT = 64  # newest of these, in which the change point is searched
LEAST_TOKENS = 8  # of a prompt: fewer have no frequency


class Detector(Protocol):
    """The part of river's detector interface that is used."""

    @property
    def drift_detected(self) -> bool:
        """Whether the last value raised an alarm."""
        ...

    def update(self, x: float) -> None:
        """Add the value of one prompt."""
        ...


def make_detector(name: str, delta: float) -> Detector:
    """Return a new detector as configured."""
    if name == "ranks":
        return RankDetector(ALARM_INTERVAL, GRACE)
    from river.drift import ADWIN, NoDrift, PageHinkley  # takes a second

    if name == "adwin":
        return ADWIN(delta=delta, clock=1, grace_period=GRACE)
    if name == "page-hinkley":
        return PageHinkley(min_instances=GRACE, delta=TOLERANCE, threshold=THRESHOLD, mode="down")
    return NoDrift()


Signal = Literal["frequency", "judged", "first"]
SIGNALS: dict[Signal, Callable[[PromptCompleted], float | None]] = {  # what a detector receives of a prompt
    # Mean logarithm of the shares of its tokens among those of earlier completions, where the memory is a source.
    "frequency": lambda prompt: prompt.frequency if prompt.emitted >= LEAST_TOKENS else None,
    # Accepted over judged, of the model's drafts.
    "judged": lambda prompt: prompt.accepted / prompt.judged if prompt.judged else None,
    # The same of the first proposal of each block: with an adaptive draft length the mix of positions changes without
    # drift, and later positions are accepted less often.
    "first": lambda prompt: prompt.first_accepted / prompt.first_judged if prompt.first_judged else None,
}


class DriftMonitor:
    """Turns completed prompts into drift events.

    Args:
        settings: the detector and its parameters; not "auto".
        signal: selects the value of a prompt.
    """

    def __init__(self, settings: DriftSettings, signal: Signal) -> None:
        self._settings, self._signal = settings, signal
        self._values: deque[tuple[int, float]] = deque(maxlen=MEMORY)  # offset and value, since the last change
        self._detector = make_detector(settings.detector, settings.delta)
        self._cooldown = COOLDOWN
        self._quiet = 0  # prompts left of the cooldown

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        """Add one prompt. Returns an event if the detector alarms; its `action` is the response to take."""
        self._quiet = max(0, self._quiet - 1)
        value = SIGNALS[self._signal](prompt)
        if value is None:
            return None
        self._add(prompt.offset, value)
        return self._alarm(prompt) if self._detector.drift_detected else None

    def _add(self, offset: int, value: float) -> None:
        self._values.append((offset, value))
        self._detector.update(value)

    def _alarm(self, prompt: PromptCompleted) -> Drifted:
        values = [value for _, value in self._values]
        falls_only = self._settings.detector != "adwin"  # a detector of falls found one, even after a larger rise
        change = max(0, len(values) - RECENT) + change_point(values[-RECENT:], falls_only=falls_only)
        before, after = fmean(values[:change]), fmean(values[change:])
        direction = "fall" if after < before else "rise"
        action = "ignored" if direction == "rise" else "cooldown" if self._quiet else self._settings.response
        if action == self._settings.response:
            self._quiet = self._cooldown
        since = list(self._values)[change:]
        self._detector = make_detector(self._settings.detector, self._settings.delta)
        self._values.clear()
        for offset, value in since:
            self._add(offset, value)
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
            signal=self._signal,
        )


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
