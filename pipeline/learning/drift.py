"""Drift detection on shares of the emitted tokens, or on the acceptance rate: the only file that imports `river`.

A detector receives one value per prompt, because tokens of one prompt are not independent. A prompt without a value is
skipped, because one NaN disables ADWIN permanently. ADWIN also alarms on improvements, which need no response.

An alarm does not reveal when the change happened: ADWIN's window still holds most of the older values. The change point
is estimated as the split of the recent rates that separates its two sides best, and a new detector continues from
there. (The best split of *all* rates since the last change was misleading: while the drafter learns, it is an old slow
rise.)
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol

from river.drift import ADWIN, NoDrift, PageHinkley

from pipeline.config.sections import DriftSettings
from pipeline.learning.fall_detector import FallDetector
from pipeline.learning.rank_detector import RankDetector
from store.events import Drifted, PromptCompleted

MEMORY = 4096  # rates kept since the last change
ALARM_INTERVAL = 10_000.0  # prompts of an unchanged stream between two false alarms of "ranks": a day of a small server
DEVIATIONS = 7.0  # cumulative fall in standard deviations that raises an alarm of "fall"
THRESHOLD, TOLERANCE = 3.0, 0.05  # Page-Hinkley's cumulative deviation, and the deviation per prompt that it ignores
GRACE = 10  # prompts before the first possible alarm: fewer say nothing of what is usual
COOLDOWN = 20  # prompts after a response in which drift is only logged: it has not had its effect yet
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


def make_detector(settings: DriftSettings, signals: int = 1) -> Detector:
    """Return a new detector as configured. `signals`: number of detectors that share the false alarms."""
    if settings.detector == "ranks":
        return RankDetector(signals * ALARM_INTERVAL, GRACE)
    if settings.detector in ("auto", "fall"):
        return FallDetector(DEVIATIONS, GRACE)
    if settings.detector == "adwin":
        return ADWIN(delta=settings.delta, clock=1, grace_period=GRACE)
    if settings.detector == "page-hinkley":
        return PageHinkley(min_instances=GRACE, delta=TOLERANCE, threshold=THRESHOLD, mode="down")
    return NoDrift()


Signal = Literal["frequency", "drafted", "predicted", "learned", "judged", "first"]
LEAST_TOKENS = 8  # of a prompt, or of it without copies of its own text: fewer have no share of predicted tokens


@dataclass(frozen=True)
class Rates:
    """Selects the value of a prompt that the detector receives."""

    # "frequency": mean logarithm of the shares of its tokens among those of earlier completions; it exists where
    # the memory is a source. "drafted": share of the emitted tokens that came from drafts, whatever drafted them;
    # it exists for every prompt. "predicted": share of them that the memory of earlier prompts held for the
    # likeliest, whatever drafted them. "learned": as "drafted", without what was copied from the prompt's own
    # text, so that drafts which rest on earlier prompts alone count. "judged": accepted over judged, of the
    # model's drafts. "first": the same, of the first proposal of each block.
    signal: Signal

    def read(self, prompt: PromptCompleted) -> float | None:
        """Return the value, a share from 0 to 1 unless it is the frequency; None if there is none.

        With an adaptive draft length the mix of positions changes without drift, and later positions are accepted less
        often. The first position is in every draft, hence "first".
        """
        if self.signal == "frequency":
            return prompt.frequency if prompt.emitted >= LEAST_TOKENS else None
        if self.signal == "drafted":
            return max(0.0, 1 - prompt.blocks / prompt.emitted) if prompt.emitted else None
        if self.signal == "predicted":
            return prompt.predicted / prompt.emitted if prompt.emitted >= LEAST_TOKENS else None
        if self.signal == "learned":
            others = prompt.emitted - prompt.own_accepted
            return max(0.0, 1 - prompt.blocks / others) if others >= LEAST_TOKENS else None
        judged, accepted = prompt.judged, prompt.accepted
        if self.signal == "first":
            judged, accepted = prompt.first_judged, prompt.first_accepted
        return accepted / judged if judged else None


class MonitoredSignal:
    """One signal with its detector and the values since the last change.

    Args:
        settings: the detector and its parameters.
        signal: selects the value of a prompt.
        signals: number of signals that share the false alarms.
    """

    def __init__(self, settings: DriftSettings, signal: Signal, signals: int = 1) -> None:
        self.signal = signal
        self.values: deque[tuple[int, float]] = deque(maxlen=MEMORY)  # offset and value
        self._settings, self._rates, self._signals = settings, Rates(signal), signals
        self._detector = make_detector(settings, signals)

    def observe(self, prompt: PromptCompleted) -> bool:
        """Add one prompt. Returns whether the detector alarms."""
        value = self._rates.read(prompt)
        if value is None:
            return False
        self._add(prompt.offset, value)
        return self._detector.drift_detected

    def find_change(self) -> int:
        """Return the number of values before the change that caused the alarm."""
        values = [value for _, value in self.values]
        falls_only = self._settings.detector != "adwin"  # a detector of falls found one, even after a larger rise
        return max(0, len(values) - RECENT) + change_point(values[-RECENT:], falls_only=falls_only)

    def restart(self, offsets: Collection[int]) -> None:
        """Replace the detector by a new one that has seen the values of these prompts only."""
        kept = [(offset, value) for offset, value in self.values if offset in offsets]
        self._detector = make_detector(self._settings, self._signals)
        self.values.clear()
        for offset, value in kept:
            self._add(offset, value)

    def _add(self, offset: int, value: float) -> None:
        self.values.append((offset, value))
        self._detector.update(value)


class DriftMonitor:
    """Turns completed prompts into drift events. The first signal that alarms decides; all begin again after it.

    Args:
        settings: the detector and its parameters.
        signals: monitored signals, each with its own detector.
    """

    def __init__(self, settings: DriftSettings, signals: Sequence[Signal]) -> None:
        self._settings = settings
        self._monitored = [MonitoredSignal(settings, signal, len(signals)) for signal in signals]
        self._cooldown = COOLDOWN
        self._quiet = 0  # prompts left of the cooldown

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        """Add one prompt. Returns an event if a detector alarms; its `action` is the response to take."""
        self._quiet = max(0, self._quiet - 1)
        alarmed = [signal for signal in self._monitored if signal.observe(prompt)]
        return self._alarm(prompt, alarmed[0]) if alarmed else None

    def _alarm(self, prompt: PromptCompleted, alarmed: MonitoredSignal) -> Drifted:
        change, values = alarmed.find_change(), list(alarmed.values)
        before, after = (fmean(value for _, value in part) for part in (values[:change], values[change:]))
        direction = "fall" if after < before else "rise"
        action = "ignored" if direction == "rise" else "cooldown" if self._quiet else self._settings.response
        if action == self._settings.response:
            self._quiet = self._cooldown
        since = {offset for offset, _ in values[change:]}
        for one in self._monitored:
            one.restart(since)
        return Drifted(
            offset=prompt.offset,
            target=prompt.target,
            dataset=prompt.dataset,
            detector=self._settings.detector,
            direction=direction,
            changed_at=min(since),
            rate_before=before,
            rate_after=after,
            action=action,
            signal=alarmed.signal,
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
