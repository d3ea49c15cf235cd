"""One replay from configuration to summary: a run's folder, its log, its versions, its curves."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.build import build_loop
from pipeline.build_models import load_models, pinned
from pipeline.committing import Committer, last_snapshot
from pipeline.config import Config
from pipeline.curves import Curves
from pipeline.dealing import Dealing
from pipeline.leftovers import UNSENT_TIMEOUT
from pipeline.loop import Loop
from pipeline.pictures import of_run
from pipeline.progress import Display
from pipeline.records import without_text
from pipeline.registering import numbers_of, open_registry
from pipeline.run_folder import CONFIG, SPOOL, is_unfinished, mlflow_of, require_new
from pipeline.source import Source, open_sources, stream
from pipeline.stop import Stop, stop_on_signals
from pipeline.tape import Tape
from stages.fingerprint import fingerprint
from stages.measured import note_in
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from store.committed import completed_prompts
from store.errors import OmnidraftError, RunError, SourceError
from store.events import Event, PromptCompleted, PromptRejected
from store.files import write_whole
from store.lock import RunLock
from store.log import RunLog
from store.manifest import read_manifest
from store.object_store_mirror import Mirror, NoMirror
from store.registry import Registry
from store.summary import SUMMARY, write_summary
from store.versions import check_model_name


class Replay:
    """A run that is ready to start, or to go on: sources are open, models are loaded, nothing has been written yet.

    Args:
        config: all settings; of a run that goes on, those that it began with.
        run_folder: where everything goes; new or empty, or that of an unfinished run.
        uri: of the MLflow store, for `models:/` names and for publishing; None is the local one beside the run.
        notice: is told what the user should know before the stream begins.
        resume: go on with the unfinished run in the folder from its last commit.
        mirror: what its commits are copied to, if to anywhere.

    Raises:
        UsageError: for anything that cannot work.
        CorruptError: the checkpoint to go on from is not what was committed.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        uri: str | None,
        notice: Callable[[str], None],
        *,
        resume: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        self._mirror = mirror or NoMirror(run_folder)
        self._lock = RunLock(run_folder)
        if is_unfinished(run_folder):
            self._lock.take()  # before anything of it is read; who writes it is named
        if not resume:
            require_new(run_folder, self._mirror.name)
        if config.publish.enabled:
            check_model_name(config.publish.name)
        self.run_folder, self._notice, self._resume = run_folder, notice, resume
        self._uri = uri or mlflow_of(self._mirror.name)
        self.config = config if resume else config.model_copy(update={"drafter": pinned(config.drafter, self._uri)})
        self._spool = run_folder / SPOOL
        self._kept = self._read_checkpoint() if resume else None
        self._measured: dict[str, Any] = self._kept.state["constants"]["measured"] if self._kept else {}
        note_in(self._measured)
        self.sources: list[Source] = open_sources(
            config.sources, config.source, seed=config.seed, targets=Dealing.of(config).targets
        )
        self._models = load_models(self.config, self._uri, run_folder.parent / ".fetched")
        self._fingerprints = [  # now: the drafter is going to learn
            [one.name, fingerprint(one.target), fingerprint(one.drafter), one.pair.digest] for one in self._models
        ]

    def _read_checkpoint(self) -> SnapshotReader | None:
        """The last commit's snapshot; None for a run that was killed before its first."""
        kept = last_snapshot(self.run_folder)
        if kept and "constants" not in kept.state:
            name = self._mirror.name
            raise RunError(f"{name} holds the run of a server; go on with it by `omnidraft serve --resume {name}`")
        return kept

    def total(self) -> int | None:
        """Prompts to expect, None if a source does not know."""
        sizes = [source.size() for source in self.sources]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def run(self, display: Display) -> dict[str, Any]:
        """Replay the stream from where it stands to its end, or until a signal.

        Returns:
            the summary, which is also in the run's folder, with `stopped`: whether the run can be gone on with, and
            `commits`: what they cost.

        Raises:
            SourceError: a source broke off, or is not the one that the run began with; what was done is committed.
            OmnidraftError: the folder cannot be written any more; the last commit stands.
        """
        try:
            with self._lock:
                return self._run(display)
        except OSError as error:
            if error.filename is not None and not Path(error.filename).resolve().is_relative_to(
                self.run_folder.resolve()
            ):
                raise
            raise OmnidraftError(
                f"the run's folder {self.run_folder} must be writable to the end, but: {error.strerror or error}. The "
                f"last commit stands: make room and go on with `omnidraft replay --resume {self._mirror.name}`"
            ) from error

    def _run(self, display: Display) -> dict[str, Any]:
        self._make_folder()
        with RunLog(self.run_folder, mirror=self._mirror) as log, stop_on_signals() as stop:
            registry = self._registry()
            curves = Curves(registry, lambda: time.time_ns() // 1_000_000, Dealing.of(self.config).targets)
            loop = build_loop(self.config, self._models, registry, self.run_folder, self._notice)
            tape = Tape(stop.until(stream(self.sources)))  # below the tape: what a signal interrupts was not taken
            if self._kept:
                self._go_on(self._kept, loop, tape, curves, display, stop)

            def save(keep: SnapshotWriter) -> Json:
                return {"loop": loop.save(keep), "tape": tape.save(), "constants": self._constants()}

            committer = Committer(self.config.commit, save, lambda: loop.learning, log, registry)

            def pause() -> bool:
                if not stop.asked and committer.is_due():
                    curves.flush()
                    committer.commit()
                return stop.asked

            broken: SourceError | None = None
            try:
                for event in loop.run(tape, pause):
                    self._take(event, log, curves, display, committer)
            except SourceError as error:
                broken = error
            stopped = stop.asked or broken is not None
            if stopped:
                display.note("stopping: committing what was done")
                registry.pause()
            curves.flush()
            committer.commit(wait=True)
            summary = write_summary(self.run_folder)
            if not stopped:
                self._finish(summary, log, registry)
            log.close()
        self._close(registry, display)
        if broken:
            raise broken
        return {**summary, "stopped": stopped, "commits": asdict(committer.costs)}

    def _go_on(
        self, kept: SnapshotReader, loop: Loop, tape: Tape, curves: Curves, display: Display, stop: Stop
    ) -> None:
        """Everything as it was at the last commit."""
        changed = [
            name
            for (name, *now), (_, *then) in zip(self._fingerprints, kept.state["constants"]["models"], strict=True)
            if now != then
        ]
        if changed:
            raise RunError(
                f"the run in {self._mirror.name} must go on with the models that it began with, but of {changed[0]} or "
                "the drafter beside it the weights or the vocabulary are others now; put them back or begin a new run"
            )
        loop.restore(kept.state["loop"], kept)
        for prompt in completed_prompts(self.run_folder):
            loop.lanes[prompt.target].coach.watch_again(prompt)
            curves.remember(prompt)
            display.remember(prompt)
        try:
            tape.skip(kept.state["tape"])
        except SourceError:
            if stop.asked:  # while it waited for what it had read already
                raise KeyboardInterrupt from None
            raise
        self._kept = None  # what it held is elsewhere now

    def _constants(self) -> dict[str, Any]:
        return {"models": self._fingerprints, "measured": dict(self._measured)}

    def _make_folder(self) -> None:
        if not self._resume:
            require_new(self.run_folder, self._mirror.name)  # still: another process may have been quicker
        write_whole(self.run_folder / CONFIG, self.config.to_json().encode())

    def _take(self, event: Event, log: RunLog, curves: Curves, display: Display, committer: Committer) -> None:
        if isinstance(event, PromptRejected) and not self.config.log.text:
            event = without_text(event)
        log.append(event)
        curves.add(event)
        display.show(event)
        if isinstance(event, PromptCompleted):
            committer.completed()

    def _finish(self, summary: dict[str, Any], log: RunLog, registry: Registry) -> None:
        """The end of the stream. Killed in here, the run goes on from the commit before it and comes here again."""
        if self.config.publish.enabled:
            files = [self.run_folder / SUMMARY, self.run_folder / CONFIG, *of_run(self.run_folder)]
            registry.finish(numbers_of(summary), files)
        mark = registry.mark()
        log.finish(mark, lambda: registry.release(mark))

    def _registry(self) -> Registry:
        datasets = [(source.dataset, spec) for source, spec in zip(self.sources, self.config.sources, strict=True)]
        manifest = read_manifest(self.run_folder)
        return open_registry(self.config, self._uri, manifest, self._spool, self.run_folder.name, datasets)

    def _close(self, registry: Registry, display: Display) -> None:
        unsent = registry.close(UNSENT_TIMEOUT)
        if unsent:
            display.note(
                f"MLflow did not take {unsent} messages; they wait in {self._mirror.name}/{SPOOL}, and "
                f"`omnidraft replay --resume {self._mirror.name}` sends them"
            )
        try:
            self._mirror.push(read_manifest(self.run_folder))
        except OmnidraftError as error:
            display.note(f"what MLflow took since the last commit is going to be sent again: {error}")
