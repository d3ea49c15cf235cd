"""The curves that MLflow draws: a few series of a run, with the stream offset as their step.

MLflow's chart page orders sections by the part of a name before the slash: `curve/` comes first of ours.
"""

from collections import deque
from collections.abc import Callable, Sequence

from store.events import Drifted, Event, PromptCompleted, Updated, VersionPublished
from store.registry import Point, Registry

WINDOW = 16  # prompts that a point of a rate looks back on
FLUSH = 32  # points sent together


class Curves:
    """Turns events into points and sends them in batches.

    Args:
        registry: where points go.
        now: milliseconds since the epoch.
    """

    def __init__(self, registry: Registry, now: Callable[[], int]) -> None:
        self._registry, self._now = registry, now
        self._window: deque[PromptCompleted] = deque(maxlen=WINDOW)
        self._points: list[Point] = []

    def add(self, event: Event) -> None:
        """Add what an event contributes."""
        match event:
            case PromptCompleted():
                self._window.append(event)
                self._put(event.offset, _rates(self._window))
            case Updated(part="drafter"):
                found = {"learn/loss": event.loss, "learn/served": float(event.served)}
                if event.acceptance_after is not None:
                    found["learn/expected_acceptance"] = event.acceptance_after
                self._put(event.offset, found)
            case Drifted():
                self._put(event.offset, {"drift/rate_before": event.rate_before, "drift/rate_after": event.rate_after})
            case VersionPublished():
                self._put(event.offset, {"version/number": event.version, "version/cache_entries": event.cache_entries})

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
    judged = sum(prompt.judged for prompt in window)
    accepted = sum(prompt.accepted for prompt in window)
    blocks = sum(prompt.blocks for prompt in window)
    emitted = sum(prompt.emitted for prompt in window)
    spent = window[-1].finished - min(prompt.started for prompt in window)
    found = {
        "curve/mean_accepted_length": accepted / blocks,
        "curve/block_efficiency": emitted / blocks,
        "curve/drafted_pieces": sum(prompt.drafted for prompt in window) / blocks,
        "curve/tokens_per_second": emitted / spent if spent > 0 else 0.0,
    }
    return found | ({"curve/acceptance_rate": accepted / judged} if judged else {})
