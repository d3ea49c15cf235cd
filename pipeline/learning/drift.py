"""Drift detection on the acceptance rate: the only file that imports `river`.

The detector is Page-Hinkley's test of falls. It receives one rate per prompt, because tokens of one prompt are not
independent: accepted over judged tokens of what the drafter model proposed. A rate of few tokens shows little, so it is
moved towards the mean; a prompt without such tokens has no rate. (The rate over all sources does not fall: where the
model's drafts fail, the memory and the own text draft instead.)

An alarm does not reveal when the change happened. It is placed where the fall began, and a new detector continues from
there. (The split of the rates that separates two levels best was misleading: with few rates after the change it lies in
an older, slow movement.)
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pipeline.config.sections import DriftSettings
from stages.engine.checkpoints.deferred_imports import defer_imports
from store.events import Drifted, PromptCompleted

MEMORY = 4096  # prompts kept since the last change
FEW = 2.0  # judged tokens with which a prompt's rate counts half
THRESHOLD, TOLERANCE = 0.5, 0.15  # cumulative deviation that is an alarm, and the deviation per prompt that is ignored
GRACE = 10  # prompts before the first possible alarm: fewer say nothing of what is usual
COOLDOWN = 20  # prompts after a response in which drift is only logged: it has not had its effect yet
RESPONSES = {  # by what an event calls them
    "reset": "the acceptance head is reset",
    "recall": "the acceptance head is reset, and versions are compared if the drafter has changed",
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


class WeightedRates:
    """Acceptance rates of prompts, those of few tokens moved towards the mean of all tokens before.

    >>> rates = WeightedRates()
    >>> [round(rates.add(accepted, judged), 2) for accepted, judged in ((14, 20), (0, 2), (2, 18))]
    [0.7, 0.35, 0.16]
    """

    def __init__(self) -> None:
        self._accepted = self._judged = 0

    def add(self, accepted: int, judged: int) -> float:
        """Return the value of a prompt, of which at least one token was judged."""
        rate = accepted / judged
        mean = self._accepted / self._judged if self._judged else rate
        self._accepted, self._judged = self._accepted + accepted, self._judged + judged
        return mean + (rate - mean) * judged / (judged + FEW)


class _Prompt(NamedTuple):
    offset: int
    accepted: int
    judged: int
    value: float  # what the detector received


class DriftMonitor:
    """Turns completed prompts into drift events."""

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self._prompts: deque[_Prompt] = deque(maxlen=MEMORY)  # since the last change
        self._rates, self._detector = WeightedRates(), make_detector(settings.detector)
        self._cooldown = COOLDOWN
        self._quiet = 0  # prompts left of the cooldown

    def observe(self, prompt: PromptCompleted) -> Drifted | None:
        """Add one prompt. Returns an event if the detector alarms; its `action` is the response to take."""
        self._quiet = max(0, self._quiet - 1)
        if not prompt.judged:
            return None
        self._add(prompt.offset, prompt.accepted, prompt.judged)
        return self._alarm(prompt) if self._detector.drift_detected else None

    def _add(self, offset: int, accepted: int, judged: int) -> None:
        value = self._rates.add(accepted, judged)
        self._prompts.append(_Prompt(offset, accepted, judged, value))
        self._detector.update(value)

    def _alarm(self, prompt: PromptCompleted) -> Drifted:
        prompts = list(self._prompts)
        change = change_point([one.value for one in prompts])
        before, after = _rate(prompts[:change]), _rate(prompts[change:])
        action = "cooldown" if self._quiet else self._settings.response
        if not self._quiet:
            self._quiet = self._cooldown
        self._rates, self._detector = WeightedRates(), make_detector(self._settings.detector)
        self._prompts.clear()
        for one in prompts[change:]:
            self._add(one.offset, one.accepted, one.judged)
        changed_at = min(one.offset for one in prompts[change:])
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


def _rate(prompts: Sequence[_Prompt]) -> float:
    return sum(one.accepted for one in prompts) / sum(one.judged for one in prompts)


def change_point(values: Sequence[float]) -> int:
    """Return the place at which the present fall began: what the values lie below their mean since then, less the
    tolerance, was never made up. The last place if there is no fall.

    >>> change_point([0.8, 0.9, 0.8, 0.3, 0.2])
    3
    >>> change_point([0.1, 0.8, 0.9, 0.8, 0.9, 0.3, 0.4])  # not the larger rise
    5
    """
    mean = below = 0.0
    place = 0
    for number, value in enumerate(values, 1):
        mean += (value - mean) / number
        below += mean - value - TOLERANCE
        if below <= 0:
            below, place = 0.0, number
    return min(place, len(values) - 1)
