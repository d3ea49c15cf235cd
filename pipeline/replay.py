"""One replay from configuration to summary: a run's folder, its log, its versions, its curves."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from pipeline.config import Config
from pipeline.curves import Curves
from pipeline.dealing import Dealing
from pipeline.progress import Display
from pipeline.source import Source, open_sources, stream
from store.errors import RunError, SourceError
from store.events import Event, TokenDecision
from store.files import write_whole
from store.log import RunLog
from store.registry import MlflowRegistry, NoRegistry, Registry, default_uri
from store.summary import write_summary

T = TypeVar("T")
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
    """Refuse a folder that already holds something, or cannot be one.

    Raises:
        RunError: if so.
    """
    taken = [path for path in (run_folder, *run_folder.parents) if path.exists() and not path.is_dir()]
    if taken:
        raise RunError(f"a run needs a folder, but {taken[0]} is a file; name another with --run")
    if run_folder.exists() and any(run_folder.iterdir()):
        raise RunError(f"a run needs a new or empty folder, but {run_folder} holds files; name another with --run")


@dataclass
class Stop:
    """Whether the user wants the run to end.

    Attributes:
        asked: the first signal came; the run ends as soon as what is under way is told.
        waiting: the run waits for its source, so that a signal may interrupt at once.
    """

    asked: bool = False
    waiting: bool = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler. The second signal interrupts whatever goes on."""
        again, self.asked = self.asked, True
        if again or self.waiting:
            raise KeyboardInterrupt

    def until(self, events: Iterator[T]) -> Iterator[T]:
        """The events of a source that may keep us waiting, up to the signal."""
        while True:
            try:
                self.waiting = True
                event = next(events, None)
                self.waiting = False
            except KeyboardInterrupt:
                self.waiting = False
                return
            if event is None:
                return
            yield event


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask the stream to end; a second one interrupts at once."""
    stop = Stop()
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Replay:
    """A run that is ready to start: sources are open, models are loaded, nothing has been written yet.

    Args:
        config: all settings.
        run_folder: where everything goes; new or empty.
        uri: of the MLflow store, for `models:/` names and for publishing; None is the local one beside the run.
        notice: is told what the user should know before the stream begins.

    Raises:
        UsageError: for anything that cannot work.
    """

    def __init__(self, config: Config, run_folder: Path, uri: str | None, notice: Callable[[str], None]) -> None:
        from pipeline.build_models import load_models  # torch: only when a run really starts

        require_new(run_folder)
        self.config, self.run_folder, self._notice = config, run_folder, notice
        self._uri = uri or default_uri(run_folder.parent)
        self._spool = run_folder / "registry-queue.jsonl"
        self.sources: list[Source] = open_sources(
            config.sources, config.source, seed=config.seed, targets=Dealing.of(config).targets
        )
        self._models = load_models(config, self._uri, run_folder.parent / ".fetched")

    def total(self) -> int | None:
        """Prompts to expect, None if a source does not know."""
        sizes = [source.size() for source in self.sources]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def run(self, display: Display) -> dict[str, Any]:
        """Replay the stream to its end, or until a signal. Returns the summary, which is also in the run's folder.

        Raises:
            SourceError: a source broke off; what was done until then is kept as after a signal.
            RunError: the run's folder cannot be made.
        """
        from pipeline.build import build_loop

        self._make_folder()
        registry = self._registry()
        curves = Curves(registry, lambda: time.time_ns() // 1_000_000, Dealing.of(self.config).targets)
        loop = build_loop(self.config, self._models, registry, self.run_folder, self._notice)
        broken: SourceError | None = None
        with RunLog(self.run_folder) as log, stop_on_signals() as stop:
            try:
                for event in self._until(loop.run(stop.until(stream(self.sources))), stop):
                    self._take(event, log, curves, display)
            except SourceError as error:
                broken = error
            if stop.asked or broken:
                display.note("stopping: writing what was done")
                for event in loop.end():
                    self._take(event, log, curves, display)
        summary = self._conclude(registry, curves, display)
        if broken:
            raise broken
        return {**summary, "stopped": stop.asked}

    def _make_folder(self) -> None:
        try:
            self.run_folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.run_folder / "config.json", self.config.to_json().encode())
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"the run's folder {self.run_folder} must be writable: {reason}; see --run") from error

    @staticmethod
    def _until(events: Iterator[Event], stop: Stop) -> Iterator[Event]:
        """Up to the signal, but with all decisions of a block if there is one of them."""
        for event in events:
            yield event
            if stop.asked and not isinstance(event, TokenDecision):
                return

    def _conclude(self, registry: Registry, curves: Curves, display: Display) -> dict[str, Any]:
        summary = write_summary(self.run_folder)
        curves.flush()
        registry.finish(_numbers(summary), [self.run_folder / "summary.json", self.run_folder / "config.json"])
        self._close(registry, display)
        return summary

    @staticmethod
    def _take(event: Event, log: RunLog, curves: Curves, display: Display) -> None:
        log.append(event)
        curves.add(event)
        display.show(event)

    def _registry(self) -> Registry:
        if not self.config.publish.enabled:
            return NoRegistry()
        registry = MlflowRegistry(self._uri, self._spool, model=self.config.publish.name)
        datasets = [(source.dataset, spec) for source, spec in zip(self.sources, self.config.sources, strict=True)]
        registry.start_run(self.run_folder.name, _params(self.config), {}, datasets)
        return registry

    def _close(self, registry: Registry, display: Display) -> None:
        unsent = registry.close(UNSENT_TIMEOUT)
        if unsent:
            display.note(f"MLflow did not take {unsent} messages; they wait in {self._spool}")


def _params(config: Config) -> dict[str, object]:
    """The few settings by which runs are told apart in MLflow's pages."""
    return {
        "target": ", ".join(Dealing.of(config).targets),
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
    """The totals, the ledger and the last fifth of each dataset, flat."""
    totals, ledger = summary["totals"], summary["totals"]["ledger"]
    numbers = totals | {f"ledger/{key}": value for key, value in ledger.items()}
    found = {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}
    for dataset, figures in summary["datasets"].items():
        for part in ("first_fifth", "last_fifth"):
            rate = figures[part]["acceptance_rate"]
            if rate is not None:
                found[f"{dataset}/{part}_acceptance_rate"] = rate
    return found
