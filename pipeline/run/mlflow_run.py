"""The run in MLflow: begun or resumed, its settings, its curves, its summary, and what could not be sent in time.

MLflow's chart page orders sections by the part of a name before the slash: `curve/` comes first of ours. With several
targets the rates of each follow those of the whole, such as `curve/acceptance_rate.llama-8b`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.settings import Config
from pipeline.learning import probe_prompts
from pipeline.routing import TargetRouter
from pipeline.run.folder import SPOOL, mlflow_of
from store.errors import RunError
from store.events import Drifted, Event, PromptCompleted, Updated, VersionPublished
from store.log.checkpoint import remove_other_checkpoints
from store.log.lock import RunLock
from store.log.manifest import Manifest, read_manifest, replace_previous
from store.log.mirror import Mirror
from store.log.partitions import LEARNER, partition_folder
from store.outbox import read_undelivered
from store.query.acceptance import Acceptance
from store.query.probe_statistics import estimate_ratio
from store.registry.registered_version import metric_name
from store.registry.registry import MlflowRegistry, NoRegistry, Point, Registry

WINDOW = 16  # prompts that a point of a rate looks back on
FLUSH = 32  # points sent together
OF_EACH_TARGET = ("curve/acceptance_rate", "curve/block_efficiency")
UNSENT_TIMEOUT = 60.0  # seconds that a finished run waits for MLflow


def open_registry(
    config: Config, uri: str, manifest: Manifest, spool: Path, run: str, datasets: Sequence[tuple[str, str]]
) -> Registry:
    """Where versions and curves go; nowhere if nothing is to be published.

    Args:
        config: all settings.
        uri: of the MLflow store.
        manifest: of the log whose commits cover the messages.
        spool: the file in which messages wait.
        run: its name.
        datasets: name and source of each.
    """
    if not config.publish.enabled:
        return NoRegistry()
    registry = MlflowRegistry(uri, spool, keep=manifest.messages)
    if manifest.messages:
        registry.resume()
    else:
        registry.start_run(run, _params(config), {}, datasets, identity=manifest.identity)
    return registry


def _params(config: Config) -> dict[str, object]:
    """Return the few settings that distinguish runs in MLflow's pages."""
    return {
        "target": ", ".join(TargetRouter.from_config(config).targets),
        "drafter": config.drafter,
        "mode": config.draft.mode,
        "loss": config.learn.loss if config.learn.enabled else "none",
        "temperature": config.sampling.temperature,
        "max_draft": config.draft.max_draft,
        "stop": config.draft.stop,
        "batch": config.batch,
        "interval": config.learn.interval,
        "seed": config.seed,
        "probe": probe_prompts.identity() if config.publish.enabled else "none",
    }


def numbers_of(summary: dict[str, Any]) -> dict[str, float]:
    """The totals, the ledger, and the first and last fifth of each dataset, flat."""
    totals, ledger = summary["totals"], summary["totals"]["ledger"]
    numbers = totals | {f"ledger/{key}": value for key, value in ledger.items()}
    found = {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}
    for dataset, part_metrics in summary["datasets"].items():
        for part in ("first_fifth", "last_fifth"):
            for name in ("acceptance_rate", "block_efficiency"):
                if (value := part_metrics[part][name]) is not None:
                    found[f"{metric_name(dataset)}/{part}_{name}"] = value
    return found


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
        """Count a prompt whose points were sent before the run was resumed."""
        self._window.append(prompt)
        if prompt.target in self._windows:
            self._windows[prompt.target].append(prompt)

    def add(self, event: Event) -> None:
        """Add what an event contributes."""
        match event:
            case PromptCompleted():
                self._window.append(event)
                self._add_points(event.offset, _rates(self._window) | self._rates_of_its_target(event))
            case Updated(part="drafter"):
                found = {"learn/loss": event.loss, "learn/served": float(event.served)}
                if event.acceptance_after is not None:
                    found["learn/expected_acceptance"] = event.acceptance_after
                self._add_points(event.offset, found)
            case Drifted():
                self._add_points(
                    event.offset, {"drift/rate_before": event.rate_before, "drift/rate_after": event.rate_after}
                )
            case VersionPublished():
                self._add_points(event.offset, self._probe_rates(event))
                if event.reason != "floor":  # MLflow compares runs by the metric that came first
                    self._add_points(
                        event.offset, {"version/number": event.version, "version/cache_entries": event.cache_entries}
                    )

    def _probe_rates(self, version: VersionPublished) -> dict[str, float]:
        """Rates on the probe, so that the page of a run has a curve of its versions; none if it was not measured."""
        of_target = f".{metric_name(version.target)}" if version.target in self._windows else ""
        tokens = version.probe_tokens or ()
        rates = {
            "acceptance": estimate_ratio(version.probe_greedy or (), tokens),
            "acceptance_sampled": estimate_ratio(version.probe_sampled or (), tokens),
            "tokens_per_forward": estimate_ratio(tokens, version.probe_forwards or ()),
            "tokens_per_second": estimate_ratio(tokens, version.probe_seconds or ()),
        }
        return {f"probe/{name}{of_target}": rate.value for name, rate in rates.items() if rate}

    def _rates_of_its_target(self, prompt: PromptCompleted) -> dict[str, float]:
        if prompt.target not in self._windows:
            return {}
        window = self._windows[prompt.target]
        window.append(prompt)
        rates, name = _rates(window), metric_name(prompt.target)
        return {f"{rate}.{name}": rates[rate] for rate in OF_EACH_TARGET if rate in rates}

    def _add_points(self, step: int, values: dict[str, float]) -> None:
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


def send_leftovers(config: Config, run_folder: Path, mirror: Mirror) -> str:
    """Send what waits in the queue of a finished run. `mirror`: what its commits were copied to.

    Returns:
        what became of it, in words.

    Raises:
        RunError: nothing waits, or another process is at work there.
    """
    learner = partition_folder(run_folder, LEARNER)  # whose queue it is in a run of several processes
    uri = config.publish.mlflow_uri or mlflow_of(mirror.name)
    with RunLock(run_folder):
        replace_previous(run_folder)
        remove_other_checkpoints(run_folder, read_manifest(run_folder).checkpoint)
        waiting, left = 0, 0
        for folder, place in ((run_folder, mirror), (learner, mirror.partition(LEARNER))):
            found = sum(1 for _ in read_undelivered(folder / SPOOL)) if (folder / SPOOL).exists() else 0
            if found:
                waiting, left = waiting + found, left + _send(config, folder, place, uri)
    if not waiting:
        raise RunError(f"the run in {mirror.name} is finished: there is nothing to resume; begin another")
    if left:
        return f"the run is finished; MLflow at {uri} took {waiting - left} of {waiting} messages, the others wait"
    return f"the run is finished; MLflow at {uri} took the {waiting} messages that waited"


def _send(config: Config, folder: Path, mirror: Mirror, uri: str) -> int:
    """What waits in one log's queue. Returns the number of messages that stayed."""
    manifest = read_manifest(folder)
    left = MlflowRegistry(uri, folder / SPOOL, keep=manifest.messages).close(UNSENT_TIMEOUT)
    mirror.acquire(manifest)
    mirror.push(manifest)
    return left
