"""The points of a run's curves in MLflow, read from its committed log.

MLflow's pages sort names, and its charts have a section for the part before a slash: the results of the run have none
and come first, then what `versions/` reached on the probe, and rates over a `window/` of prompts. With several targets
the rates of each follow those of the whole, such as `window/acceptance_rate.llama-8b`.

Whoever reads a log to the same commits gets the same points, in the same order and with the same times: MLflow takes a
point that it has already for the same one.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from store.events import Drifted, PromptCompleted, Updated, VersionPublished
from store.log.manifest import Manifest, RunKind
from store.log.parts import read_part
from store.query.rates import Acceptance, estimate_ratio
from store.registry.registered_version import metric_name

Row = TypeVar("Row", PromptCompleted, Updated, Drifted, VersionPublished)
Logs = Mapping[Path, Manifest]  # committed, by folder
_TEXTS = ("prompt_text", "completion_text")
_MOST_TIMES = 100_000  # prompts whose times are remembered for updates that the log has later


WINDOW = 16  # prompts that a point of a rate looks back on
OF_EACH_TARGET = ("window/acceptance_rate", "window/block_efficiency")


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
        """Return what it reached on the probe, and its number if it is no baseline."""
        of_target = f".{metric_name(version.target)}" if version.target in self._windows else ""
        found = {f"{name}{of_target}": value for name, value in _probe_rates(version).items()}
        return found if version.reason == "baseline" else found | {"version": float(version.version)}


def describe_step(event: Updated | Drifted) -> dict[str, float]:
    """Return the numbers of an update of the drafter, or of a drift; none of an update of the head."""
    if isinstance(event, Drifted):
        return {"window/drift_rate_before": event.rate_before, "window/drift_rate_after": event.rate_after}
    if event.part != "drafter":
        return {}
    found = {"window/loss": event.loss, "window/served": float(event.served)}
    if event.acceptance_after is not None:
        found["window/expected_acceptance"] = event.acceptance_after
    return found


def _probe_rates(version: VersionPublished) -> dict[str, float]:
    tokens = version.probe_tokens or ()
    rates = {
        "versions/acceptance": estimate_ratio(version.probe_greedy or (), tokens),
        "versions/tokens_per_pass": estimate_ratio(tokens, version.probe_forwards or ()),
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
    found = {"window/tokens_per_second": emitted / spent if spent > 0 else 0.0}
    if blocks:  # none if all were cancelled while their prompts were read
        found["window/block_efficiency"] = emitted / blocks
        found["window/accepted_by_model"] = acceptance.accepted / blocks
    if by_model < blocks:
        own = sum(prompt.own_accepted for prompt in window)
        copied = sum(prompt.lookup_accepted for prompt in window)
        found |= {
            "window/lookup_share": 1 - by_model / blocks,
            "window/accepted_from_own_text": own / blocks,
            "window/accepted_from_memory": (copied - own) / blocks,
        }
    if by_model:
        drafted = sum(prompt.drafted for prompt in window)
        found |= {
            "window/mean_accepted_length": acceptance.accepted / by_model,
            "window/drafted_pieces": drafted / by_model,
        }
    if acceptance.rate is None or acceptance.interval is None:
        return found
    low, high = acceptance.interval
    rates = {"rate": acceptance.rate, "low": low, "high": high, "judged": float(acceptance.judged)}
    return found | {f"window/acceptance_{name}": value for name, value in rates.items()}


class Point(NamedTuple):
    """A point of a curve."""

    key: str
    value: float
    step: int  # stream offset
    time: int  # milliseconds since 1970


class RowReader:
    """Reads the rows of tables that were committed since the last call."""

    def __init__(self) -> None:
        self._read: Counter[tuple[Path, str]] = Counter()  # rows, by log and table

    def read(
        self,
        folder: Path,
        manifest: Manifest,
        table: str,
        kind: type[Row],
        *,
        most: int | None = None,
        until: float = math.inf,
    ) -> Iterator[Row]:
        """Yield the new rows of a log's table, without texts, up to the first one that finished after `until`.

        `most`: rows of the table that count as committed.
        """
        first, known = 0, {field.name for field in fields(kind)}
        for part in manifest.tables[table]:
            after = first + part.rows
            if after > self._read[folder, table]:
                rows = read_part(folder, part)
                names = [name for name in rows.schema.names if name in known and name not in _TEXTS]
                blank: dict[str, Any] = dict.fromkeys(known & set(_TEXTS), "")
                for values in rows.select(names).slice(self._read[folder, table] - first).to_pylist():
                    row = kind(**values, **blank)
                    too_new = most is not None and self._read[folder, table] >= most
                    if too_new or (isinstance(row, PromptCompleted) and row.finished > until):
                        return
                    self._read[folder, table] += 1
                    yield row
            first = after


class LogPoints:
    """Yields the points of the curves of a run that `began` so many milliseconds after 1970.

    An update or a drift has the time of the prompt after which it happened. Prompts of several workers are in the order
    in which they finished; so those after the last commit of a worker that is still at work are left for later.
    """

    def __init__(self, began: int, targets: Sequence[str]) -> None:
        self._began, self._curves = began, Curves(targets)
        self._rows, self._times = RowReader(), dict[int, int]()  # times of prompts by offset
        self._waiting: tuple[deque[Updated | Drifted], ...] = (deque(), deque())  # updates, and drifts
        self.last_time = began  # of a prompt

    def read(self, logs: Logs, *, ended: bool) -> Iterator[Point]:
        """Yield the points of what was committed since the last call. `ended`: the run will commit nothing more."""
        until = math.inf if ended else _common_end(logs)
        streams = (
            self._rows.read(folder, manifest, "prompts", PromptCompleted, until=until)
            for folder, manifest in logs.items()
        )
        for prompt in heapq.merge(*streams, key=attrgetter("finished")):
            yield from self._add_prompt(prompt)
        for folder, manifest in logs.items():
            updates, drifts = self._waiting
            updates.extend(self._rows.read(folder, manifest, "updates", Updated))
            drifts.extend(self._rows.read(folder, manifest, "drifts", Drifted))
        for events in self._waiting:
            while events and (ended or self._is_placed(events[0])):
                yield from self._add_step(events.popleft())

    def _is_placed(self, event: Updated | Drifted) -> bool:
        """Return whether the prompt of an event was read; its time may be forgotten."""
        return event.offset in self._times or event.offset < next(iter(self._times), 0)

    def _add_prompt(self, prompt: PromptCompleted) -> Iterator[Point]:
        self._curves.add_prompt(prompt)
        when = self._began + round(1000 * prompt.finished)
        self._times[prompt.offset] = self.last_time = when
        if len(self._times) > _MOST_TIMES:
            self._times = dict(list(self._times.items())[_MOST_TIMES // 2 :])
        for key, value in self._curves.measure_prompts(prompt.target).items():
            yield Point(key, value, prompt.offset, when)

    def _add_step(self, event: Updated | Drifted) -> Iterator[Point]:
        when = self._times.get(event.offset, self.last_time if not self._times else self._began)
        for key, value in describe_step(event).items():
            if math.isfinite(value):
                yield Point(key, value, event.offset, when)


def _common_end(logs: Logs) -> float:
    """Return the second up to which the logs of all workers at work are complete."""
    ends = [math.inf]
    for folder, manifest in logs.items():
        if manifest.kind is RunKind.WORKER and not manifest.finished:
            parts = manifest.tables["prompts"]
            finished = read_part(folder, parts[-1], ["finished"])["finished"].to_pylist() if parts else ()
            ends.append(max(finished, default=0.0))
    return min(ends)
