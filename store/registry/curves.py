"""The curves of a run in MLflow: which numbers an event of the log contributes.

MLflow's pages sort names, and its charts have a section for the part before a slash: what versions reached on the
probe has none and comes first. With several targets the rates of each follow those of the whole, such as
`curve/acceptance_rate.llama-8b`.
"""

from collections import deque
from collections.abc import Sequence

from store.events import Drifted, PromptCompleted, Updated, VersionPublished
from store.query.rates import Acceptance, estimate_ratio
from store.registry.registered_version import metric_name

WINDOW = 16  # prompts that a point of a rate looks back on
OF_EACH_TARGET = ("curve/acceptance_rate", "curve/block_efficiency")


class Curves:
    """Converts the events of a run, in their order, to numbers by name. `targets`: of the run."""

    def __init__(self, targets: Sequence[str] = ()) -> None:
        several = targets if len(targets) > 1 else ()
        self._windows: dict[str, deque[PromptCompleted]] = {target: deque(maxlen=WINDOW) for target in several}
        self._window: deque[PromptCompleted] = deque(maxlen=WINDOW)

    def add_prompt(self, prompt: PromptCompleted) -> None:
        self._window.append(prompt)
        if prompt.target in self._windows:
            self._windows[prompt.target].append(prompt)

    def measure_prompts(self, target: str) -> dict[str, float]:
        """Return the rates over the last prompts and, with several targets, over the last ones of a target."""
        found = _rates(self._window)
        if target in self._windows:
            rates, name = _rates(self._windows[target]), metric_name(target)
            found |= {f"{rate}.{name}": rates[rate] for rate in OF_EACH_TARGET if rate in rates}
        return found

    def describe_version(self, version: VersionPublished) -> dict[str, float]:
        """Return what it reached on the probe, by the names of its own metrics, and its number if it is no baseline."""
        of_target = f".{metric_name(version.target)}" if version.target in self._windows else ""
        found = {f"{name}{of_target}": value for name, value in _probe_rates(version).items()}
        return found if version.reason == "baseline" else found | {"version": float(version.version)}


def describe_step(event: Updated | Drifted) -> dict[str, float]:
    """Return the numbers of an update of the drafter, or of a drift; none of an update of the head."""
    if isinstance(event, Drifted):
        return {"drift/rate_before": event.rate_before, "drift/rate_after": event.rate_after}
    if event.part != "drafter":
        return {}
    found = {"learn/loss": event.loss, "learn/served": float(event.served)}
    if event.acceptance_after is not None:
        found["learn/expected_acceptance"] = event.acceptance_after
    return found


def _probe_rates(version: VersionPublished) -> dict[str, float]:
    tokens = version.probe_tokens or ()
    rates = {
        "acceptance": estimate_ratio(version.probe_greedy or (), tokens),
        "tokens_per_pass": estimate_ratio(tokens, version.probe_forwards or ()),
        "tokens_per_second": estimate_ratio(tokens, version.probe_seconds or ()),
    }
    return {name: rate.value for name, rate in rates.items() if rate}


def _rates(window: Sequence[PromptCompleted]) -> dict[str, float]:
    """Acceptance, its length and the drafts' are those of the model; the rest is of all blocks.

    `lookup_share` is the share of copied drafts, from the own text and from the memory; `accepted_by_model`,
    `accepted_from_own_text` and `accepted_from_memory` are tokens per target forward. `acceptance_low` and
    `acceptance_high` are the ends of the interval of 95%, for `acceptance_judged` tokens. Where none was judged, these
    are left out.
    """
    acceptance = Acceptance.sum_over(window)
    blocks = sum(prompt.blocks for prompt in window)
    by_model = blocks - sum(prompt.lookup_blocks for prompt in window)
    emitted = sum(prompt.emitted for prompt in window)
    spent = window[-1].finished - min(prompt.started for prompt in window)
    found = {"curve/tokens_per_second": emitted / spent if spent > 0 else 0.0}
    if blocks:  # none if all were cancelled while their prompts were read
        found["curve/block_efficiency"] = emitted / blocks
        found["curve/accepted_by_model"] = acceptance.accepted / blocks
    if by_model < blocks:
        own = sum(prompt.own_accepted for prompt in window)
        copied = sum(prompt.lookup_accepted for prompt in window)
        found |= {
            "curve/lookup_share": 1 - by_model / blocks,
            "curve/accepted_from_own_text": own / blocks,
            "curve/accepted_from_memory": (copied - own) / blocks,
        }
    if by_model:
        drafted = sum(prompt.drafted for prompt in window)
        found |= {
            "curve/mean_accepted_length": acceptance.accepted / by_model,
            "curve/drafted_pieces": drafted / by_model,
        }
    if acceptance.rate is None or acceptance.interval is None:
        return found
    low, high = acceptance.interval
    rates = {"rate": acceptance.rate, "low": low, "high": high, "judged": float(acceptance.judged)}
    return found | {f"curve/acceptance_{name}": value for name, value in rates.items()}
