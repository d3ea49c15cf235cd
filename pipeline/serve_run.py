"""A server's run: its folder, its models, the engine and the learner beside it, from start to commit."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.build_models import load_models, pinned
from pipeline.committing import last_snapshot
from pipeline.config import Config
from pipeline.learner_host import past_of
from pipeline.run_folder import CONFIG, is_unfinished, mlflow_of, require_new
from pipeline.serve_build import build_engine, learner_of, require_same, serving_config
from pipeline.serve_engine import LiveEngine
from store.errors import RunError
from store.events import Event
from store.files import write_whole
from store.lock import RunLock
from store.log import RunLog
from store.object_store_mirror import Mirror, NoMirror

LEARNER_SECONDS = 60.0  # that the learner gets to commit when the server ends


class Serving:
    """An engine over a run's folder. A context manager: it starts the engine, and in the end commits.

    Args:
        config: all settings; of a run that is gone on with, those that it began with.
        run_folder: new or empty, or with `resume` that of an earlier server.
        see: is told every event as it happens, on any thread.
        notice: is told what the user should know.
        resume: go on with the run.
        mirror: what its commits are copied to, if to anywhere.

    Raises:
        UsageError: for anything that cannot work.
        CorruptError: the checkpoint to go on from is not what was committed.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        see: Callable[[Event], None],
        notice: Callable[[str], None],
        *,
        resume: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        self._mirror = mirror or NoMirror(run_folder)
        self._uri = config.publish.mlflow_uri or mlflow_of(self._mirror.name)
        self.run_folder, self._see, self._notice = run_folder, see, notice
        if resume:
            _require_served(run_folder, self._mirror.name)
        else:
            require_new(run_folder, self._mirror.name)
        with ExitStack() as undo:
            undo.enter_context(RunLock(run_folder))
            drafter = config.drafter if resume else pinned(config.drafter, self._uri)
            self._settings = config.with_overrides({"drafter": drafter})
            self.config = serving_config(self._settings)
            self._kept = last_snapshot(run_folder)
            (self.models,) = load_models(self.config, self._uri, run_folder.parent / ".fetched")
            if self._kept:
                require_same(self._kept, self.models, run_folder)  # before a learner writes anything
            self._exit = undo.pop_all()

    def __enter__(self) -> Self:
        with self._exit as undo:
            write_whole(self.run_folder / CONFIG, self._settings.to_json().encode())
            past = past_of(self.run_folder)
            log = RunLog(self.run_folder, mirror=self._mirror)
            undo.callback(log.close)
            self._learner = learner_of(
                self.config, self.models, self.run_folder, self._mirror, self._uri, past, self._see, self._notice
            )
            if self._learner:
                undo.callback(self._learner.close, 0.0)
            self.engine: LiveEngine = build_engine(
                self.config, self.models, self.run_folder, log, self._kept, past, self._learner, self._see, self._notice
            )
            self._kept = None  # what it held is elsewhere now
            gc.collect()
            gc.freeze()  # looking through models and libraries again and again would hold up every stream
            self.engine.start()
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._exit:
            self.engine.close(0.0 if kind else self.config.serve.grace_seconds)
            if self._learner:
                self._learner.close(LEARNER_SECONDS)
        if self.engine.failure and not error:
            raise RunError(f"the engine stopped: {self.engine.failure!r}") from self.engine.failure


def _require_served(run_folder: Path, name: str) -> None:
    if not is_unfinished(run_folder):
        raise RunError(f"{name} must hold the run of a server to go on with, but does not; begin one with --run")
