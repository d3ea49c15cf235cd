"""The curves that MLflow draws: a few series of a run, with the stream offset as their step.

MLflow's chart page orders sections by the part of a name before the slash: `curve/` comes first of ours. With several
targets the rates of each follow those of the whole, such as `curve/acceptance_rate.llama-8b`.
"""

from collections import deque
from collections.abc import Callable, Sequence

from store.events import Drifted, Event, PromptCompleted, Updated, VersionPublished
from store.registry import Point, Registry
from store.versions import metric_name

WINDOW = 16  # prompts that a point of a rate looks back on
FLUSH = 32  # points sent together
OF_EACH_TARGET = ("curve/acceptance_rate", "curve/block_efficiency")


class Curves:
    """Turns events into points and sends them in batches.

    Args:
        registry: where points go.
        now: milliseconds since the epoch.
        targets: of the run.
    """

    def __init__(self, registry: Registry, now: Callable[[], int], targets: Sequence[str] = ()) -> None:
        self._registry, self._now = registry, now
        several = targets if len(targets) > 1 else ()
        self._windows: dict[str, deque[PromptCompleted]] = {target: deque(maxlen=WINDOW) for target in several}
        self._window: deque[PromptCompleted] = deque(maxlen=WINDOW)
        self._points: list[Point] = []

    def remember(self, prompt: PromptCompleted) -> None:
        """A prompt whose points were sent before the run was gone on with."""
        self._window.append(prompt)
        if prompt.target in self._windows:
            self._windows[prompt.target].append(prompt)

    def add(self, event: Event) -> None:
        """Add what an event contributes."""
        match event:
            case PromptCompleted():
                self._window.append(event)
                self._put(event.offset, _rates(self._window) | self._rates_of_its_target(event))
            case Updated(part="drafter"):
                found = {"learn/loss": event.loss, "learn/served": float(event.served)}
                if event.acceptance_after is not None:
                    found["learn/expected_acceptance"] = event.acceptance_after
                self._put(event.offset, found)
            case Drifted():
                self._put(event.offset, {"drift/rate_before": event.rate_before, "drift/rate_after": event.rate_after})
            case VersionPublished() if event.reason != "floor":  # MLflow compares by the metric that came first
                self._put(event.offset, {"version/number": event.version, "version/cache_entries": event.cache_entries})

    def _rates_of_its_target(self, prompt: PromptCompleted) -> dict[str, float]:
        if prompt.target not in self._windows:
            return {}
        window = self._windows[prompt.target]
        window.append(prompt)
        rates, name = _rates(window), metric_name(prompt.target)
        return {f"{rate}.{name}": rates[rate] for rate in OF_EACH_TARGET if rate in rates}

    def _put(self, step: int, values: dict[str, float]) -> None:
        now = self._now()
        self._points += [(key, value, step, now) for key, value in values.items()]
        if len(self._points) >= FLUSH:
            self.flush()

    def flush(self) -> None:
        """Send what is waiting."""
        if self._points:
            self._registry.log_points(self._points)
            self._points = []


def _rates(window: Sequence[PromptCompleted]) -> dict[str, float]:
    """Acceptance, its length and the drafts' are those of the model; the rest is of all blocks."""
    judged = sum(prompt.judged for prompt in window)
    accepted = sum(prompt.accepted for prompt in window)
    blocks = sum(prompt.blocks for prompt in window)
    by_model = blocks - sum(prompt.lookup_blocks for prompt in window)
    emitted = sum(prompt.emitted for prompt in window)
    spent = window[-1].finished - min(prompt.started for prompt in window)
    found = {
        "curve/block_efficiency": emitted / blocks,
        "curve/tokens_per_second": emitted / spent if spent > 0 else 0.0,
    }
    if by_model < blocks:
        found["curve/lookup_share"] = 1 - by_model / blocks
    if by_model:
        drafted = sum(prompt.drafted for prompt in window)
        found |= {"curve/mean_accepted_length": accepted / by_model, "curve/drafted_pieces": drafted / by_model}
    return found | ({"curve/acceptance_rate": accepted / judged} if judged else {})
