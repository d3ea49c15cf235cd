"""One replay from configuration to summary, in one process."""

import logging
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.assembly.admission import Admission, find_fault
from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import fingerprints, load_models, settle_settings
from pipeline.config.settings import Config
from pipeline.learning.local_learner import LocalLearner
from pipeline.loop import Loop
from pipeline.reports.artifacts import draw_run_plots
from pipeline.reports.progress import Display
from pipeline.reports.vocab_report import describe_pairs, write_pair_reports
from pipeline.run.context import RunContext
from pipeline.run.folder import VOCABULARY, mlflow_of
from pipeline.run.mlflow_run import UNSENT_TIMEOUT
from pipeline.run.signals import Stop, stop_on_signals
from pipeline.sources.position import SourcePosition
from pipeline.sources.stream import datasets_of, open_sources, require_prompt, stream, total
from stages.contract.snapshot import State, load_state
from stages.engine.forward_pass.measurements import Measurements
from store.errors import OmnidraftError, RunError, SourceError
from store.log.manifest import RunKind
from store.log.parts import completed_prompts
from store.log.run_log import Mirror
from store.query.summary import write_summary

LOG = logging.getLogger("omnidraft.run")


class Replay:
    """A run that is ready to start or to resume: sources are open, models are loaded, nothing has been written yet."""

    def __init__(self, config: Config, run_folder: Path, *, resume: bool = False, mirror: Mirror | None = None) -> None:
        self._run = RunContext(run_folder, RunKind.REPLAY, mirror)
        self._uri = config.publish.mlflow_uri or mlflow_of(self._run.name)
        with self._run.acquire(resume=resume):
            self.config = settle_settings(config, self._uri, resume=resume)
            self._state: State | None = self._run.snapshot
            self._measurements = Measurements(self._state["measured"] if self._state else {})
            self._sources = open_sources(config.sources, config.source, seed=config.seed, targets=config.router.targets)
            events = stream(self._sources)
            # A run without any prompt is refused before a model is loaded and before anything is written.
            events = events if resume else require_prompt(events)
            self._models = load_models(self.config, self._uri, run_folder.parent / ".fetched", self._measurements)
            admissions = [Admission(self.config, models) for models in self._models]
            self._events = events if resume else require_prompt(events, lambda prompt: find_fault(prompt, admissions))
            self._fingerprints = tuple((one.name, *fingerprints(one)) for one in self._models)

    def total(self) -> int | None:
        """Prompts to expect, None if a source does not know."""
        return total(self._sources)

    def run(self, display: Display) -> dict[str, Any]:
        """Replay the rest of the stream, or until a signal. Returns the summary, which is also in the run's folder,
        with `stopped`: whether the run can be resumed, and `commits`: what they cost. Raises `SourceError` if a source
        broke off, or is not the one that the run began with (what was done is committed), and `OmnidraftError` if the
        folder cannot be written any more (the last commit is intact).
        """
        folder = self._run.folder
        try:
            with self._run.open(self.config.to_json()):
                write_pair_reports(folder / VOCABULARY, describe_pairs(self._models))
                with stop_on_signals() as stop:
                    summary, broken = self._replay(stop, display)
                self._run.disconnect(UNSENT_TIMEOUT)
        except OSError as error:
            if error.filename is not None and not Path(error.filename).resolve().is_relative_to(folder.resolve()):
                raise
            resume = f"omnidraft replay --resume {shlex.quote(self._run.name)}"
            raise OmnidraftError(
                f"the run's folder {folder} must be writable to the end, but: {error.strerror or error}. The last "
                f"commit is intact: free some space and resume with `{resume}`"
            ) from error
        if broken:
            raise broken
        return summary

    def edit_learners(self, edit: Callable[[LocalLearner], int], display: Display) -> int:
        """Change what was learned in a run that resumes, and commit it. No prompt is replayed. `edit` changes the
        learner of a target and returns a count. Returns the sum of the counts.
        """
        with self._run.open(self.config.to_json()):
            with stop_on_signals() as stop:
                loop, _ = self._start(stop, display)
                learners = [runner.learner for runner in loop.runners.values()]
                count = sum(edit(learner) for learner in learners if isinstance(learner, LocalLearner))
            self._run.commit(wait=True)
            self._run.disconnect(UNSENT_TIMEOUT)
        return count

    def _start(self, stop: Stop, display: Display) -> tuple[Loop, SourcePosition]:
        run = self._run
        run.connect(self.config, self._uri, datasets_of(self._sources, self.config.sources))
        loop = build_loop(self.config, self._models, run.folder, prompts=self.total() or 0, level=logging.INFO)
        # Signals are handled below the position: what they interrupt was not taken.
        position = SourcePosition(stop.take_until_signal(self._events))
        if self._state:
            self._resume(self._state, loop, position, display, stop)

        def save() -> State:
            measured = dict(self._measurements.recorded or {})
            read = {"position": position.state, "models": self._fingerprints}
            return {"loop": loop.state_dict(), **read, "measured": measured}

        run.commit_by(
            self.config.commit.seconds, save, display.show, lambda: loop.updating, rows=True, text=self.config.log.text
        )
        return loop, position

    def _replay(self, stop: Stop, display: Display) -> tuple[dict[str, Any], SourceError | None]:
        """The summary, and how a source broke off if one did."""
        run = self._run
        loop, position = self._start(stop, display)

        def pause() -> bool:
            if not stop.requested and run.committer.is_due():
                run.commit()
            return stop.requested

        broken: SourceError | None = None
        try:
            run.events.take(loop.run(position, pause))
        except SourceError as error:
            broken = error
        stopped = stop.requested or broken is not None
        if stopped:
            LOG.info("stopping: committing what was done")
        run.commit(wait=True)
        summary = write_summary(run.folder)
        if not stopped:
            if self.config.publish.enabled:
                draw_run_plots(run.folder)
            run.finish()
        return {**summary, "stopped": stopped, "commits": asdict(run.committer.costs)}, broken

    def _resume(self, state: State, loop: Loop, position: SourcePosition, display: Display, stop: Stop) -> None:
        then = [tuple(before) for before in state["models"]]
        changed = [now[0] for now, before in zip(self._fingerprints, then, strict=True) if now[1:] != before[1:]]
        if changed:
            raise RunError(
                f"the run in {self._run.name} must resume with the models that it began with, but the weights or the "
                f"vocabulary of {changed[0]}, or of its drafter, have changed; restore them or begin a new run"
            )
        load_state(loop, state["loop"])
        count = 0
        for count, prompt in enumerate(completed_prompts(self._run.folder), 1):  # noqa: B007
            loop.runners[prompt.target].learner.replay_history(prompt)
            display.remember(prompt)
        LOG.info("resumed after %d completed prompts", count, extra={"prompts": count})
        try:
            position.skip(state["position"])
        except SourceError:
            if stop.requested:  # while it read again what it had read before
                raise KeyboardInterrupt from None
            raise
        self._state = self._run.snapshot = None  # what it held is elsewhere now
