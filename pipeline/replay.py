"""One replay from configuration to summary: a run's folder, its log, its versions, its curves."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.config import Config
from pipeline.curves import Curves
from pipeline.progress import Display
from pipeline.source import Source, open_sources, stream
from store.errors import RunError
from store.events import Event
from store.log import RunLog, write_whole
from store.registry import MlflowRegistry, NoRegistry, Registry, default_uri
from store.summary import write_summary

UNSENT_TIMEOUT = 60.0  # seconds that a finished run waits for MLflow


def new_run_folder(runs: Path, now: time.struct_time) -> Path:
    """A name for a run that starts now; counted up if it is taken."""
    name = time.strftime("%Y%m%d-%H%M%S", now)
    folder, number = runs / name, 1
    while folder.exists():
        number += 1
        folder = runs / f"{name}-{number}"
    return folder


def require_new(run_folder: Path) -> None:
    """Refuse a folder that already holds something.

    Raises:
        RunError: if it does.
    """
    if run_folder.exists() and any(run_folder.iterdir()):
        raise RunError(f"a run needs a new or empty folder, but {run_folder} holds files; name another with --run")


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask the stream to end behind the current event; a second one interrupts at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Replay:
    """A run that is ready to start: sources are open, models are loaded, nothing has been written yet.

    Args:
        config: all settings; `config.run` names the run's folder.
        display: shows the events.
        uri: of the MLflow store, for `models:/` names and for publishing.

    Raises:
        UsageError: for anything that cannot work.
    """

    def __init__(self, config: Config, run_folder: Path, uri: str | None, notice: Callable[[str], None]) -> None:
        from pipeline.build import load_models  # torch: only when a run really starts

        require_new(run_folder)
        self.config, self.run_folder, self._notice = config, run_folder, notice
        self._uri = uri or default_uri(run_folder.parent)
        self.sources: list[Source] = open_sources(config.sources, config.source, seed=config.seed)
        self._models = load_models(config, self._uri, run_folder.parent / ".fetched")

    def total(self) -> int | None:
        """Prompts to expect, None if a source does not know."""
        sizes = [source.size() for source in self.sources]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def run(self, display: Display) -> dict[str, Any]:
        """Replay the stream to its end, or until a signal. Returns the summary, which is also in the run's folder."""
        from pipeline.build import build_loop

        self.run_folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.run_folder / "config.json", self.config.to_json().encode())
        registry = self._registry()
        curves = Curves(registry, lambda: time.time_ns() // 1_000_000)
        loop = build_loop(self.config, self._models, registry, self.run_folder, self._notice)
        with RunLog(self.run_folder) as log, stop_on_signals() as stopping:
            events = loop.run(stream(self.sources))
            for event in self._until(events, stopping):
                self._take(event, log, curves, display)
            if stopping():
                display.note("stopping: writing what was done")
                for event in loop.end():
                    self._take(event, log, curves, display)
        summary = write_summary(self.run_folder)
        curves.flush()
        registry.finish(_numbers(summary), [self.run_folder / "summary.json", self.run_folder / "config.json"])
        self._close(registry, display)
        return {**summary, "stopped": stopping()}

    @staticmethod
    def _until(events: Iterator[Event], stopping: Callable[[], bool]) -> Iterator[Event]:
        for event in events:
            yield event
            if stopping():
                return

    @staticmethod
    def _take(event: Event, log: RunLog, curves: Curves, display: Display) -> None:
        log.append(event)
        log.commit()
        curves.add(event)
        display.show(event)

    def _registry(self) -> Registry:
        if not self.config.publish.enabled:
            return NoRegistry()
        registry = MlflowRegistry(
            self._uri, self.run_folder / "registry-queue.jsonl", model=self.config.publish.name
        )
        registry.start_run(self.run_folder.name, _params(self.config), {}, [(s.dataset, s.dataset) for s in self.sources])
        return registry

    def _close(self, registry: Registry, display: Display) -> None:
        unsent = registry.close(UNSENT_TIMEOUT)
        if unsent:
            display.note(f"MLflow did not take {unsent} messages; they wait in {self.run_folder / 'registry-queue.jsonl'}")


def _params(config: Config) -> dict[str, object]:
    """The few settings by which runs are told apart in MLflow's pages."""
    return {
        "target": config.target,
        "drafter": config.drafter,
        "mode": config.draft.mode,
        "loss": config.learn.loss if config.learn.enabled else "none",
        "temperature": config.sampling.temperature,
        "max_draft": config.draft.max_draft,
        "stop_rule": config.draft.stop_rule if config.draft.adapt else "never",
        "batch": config.batch,
        "interval": config.learn.interval,
        "seed": config.seed,
    }


def _numbers(summary: dict[str, Any]) -> dict[str, float]:
    """The totals and the last fifth of each dataset, flat."""
    found = {key: float(value) for key, value in summary["totals"].items() if isinstance(value, int | float)}
    for dataset, figures in summary["datasets"].items():
        for part in ("first_fifth", "last_fifth"):
            rate = figures[part]["acceptance_rate"]
            if rate is not None:
                found[f"{dataset}/{part}_acceptance_rate"] = rate
    return found
