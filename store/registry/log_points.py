"""The points of a run's curves, read from its committed log.

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
from store.registry.curves import Curves, describe_step

Row = TypeVar("Row", PromptCompleted, Updated, Drifted, VersionPublished)
Logs = Mapping[Path, Manifest]  # committed, by folder
_TEXTS = ("prompt_text", "completion_text")
_MOST_TIMES = 100_000  # prompts whose times are remembered for updates that the log has later


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
        self._last = began

    @property
    def last_time(self) -> int:
        return self._last

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
        self._times[prompt.offset] = self._last = when
        if len(self._times) > _MOST_TIMES:
            self._times = dict(list(self._times.items())[_MOST_TIMES // 2 :])
        for key, value in self._curves.measure_prompts(prompt.target).items():
            yield Point(key, value, prompt.offset, when)

    def _add_step(self, event: Updated | Drifted) -> Iterator[Point]:
        when = self._times.get(event.offset, self._last if not self._times else self._began)
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
