"""A server's run from start to commit: its folder, its models, the engine and the learner process."""

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

from pipeline.assembly.admission import read_chat_template
from pipeline.assembly.loop import make_runner
from pipeline.assembly.models import Models, fingerprints, load_models, settle_settings
from pipeline.assembly.probe import examples_of
from pipeline.assembly.stages import make_drafting
from pipeline.assembly.training import piece_cost
from pipeline.config.sections import SourceSettings
from pipeline.config.settings import Config
from pipeline.learner_protocol import Learner
from pipeline.learner_service.process import LearnerProcess
from pipeline.learner_service.service import LearnerCheckpoint, LearnerConfig, read_learner_checkpoint
from pipeline.learning.drift import DriftMonitor
from pipeline.learning.local_learner import NoLearner
from pipeline.learning.remote_learner import RemoteLearner
from pipeline.loop import Clock, Loop
from pipeline.reports.vocab_report import describe_pairs, write_pair_reports
from pipeline.run.context import RunContext
from pipeline.run.folder import VOCABULARY, is_unfinished, mlflow_of
from pipeline.serve.engine import LiveEngine
from pipeline.serve.messages import GRACE_SECONDS
from pipeline.serve.request_queue import DATASET, RequestQueue
from stages.contract.snapshot import State, load_state
from stages.drafting.head import AcceptanceHead
from stages.engine.models.devices import count_threads
from stages.learn.training.weight_update import apply_weights
from stages.verification.rules import MODES
from stages.vocabulary.chat import ChatEncoder, Conversation, PlainConversation
from store.collection import freeze_objects
from store.errors import RunError, UsageError
from store.events import Event
from store.log.manifest import RunKind
from store.log.parts import completed_prompts
from store.log.run_log import Mirror
from store.object_store.uri import uri_of

LOG = logging.getLogger("omnidraft.serve")

CPU_SHARE = 0.2  # of one core is the learner's while requests run, so that it hardly competes with them
LEARNER_SECONDS = 60.0  # for the learner's last commit during a shutdown
CRASH_SECONDS = 2.0  # the same after an error, when clients wait for the restart


def make_conversation(settings: SourceSettings, models: Models) -> Conversation:
    """Make the encoder of conversations: by the target's chat template, the configured one, or without a template."""
    vocabulary = models.target_vocabulary
    if settings.chat_template is None and not vocabulary.tokenizer.chat_template:
        LOG.warning(
            "%s has no chat template: conversations are completed as their contents with a blank line between",
            vocabulary.name,
        )
        return PlainConversation(vocabulary, models.drafter_vocabulary)
    return ChatEncoder(vocabulary, models.drafter_vocabulary, models.pair, read_chat_template(settings))


def derive_serving_config(config: Config) -> Config:
    """Return the settings that a server uses: nothing learns if `serve.learn` is off. Raises `UsageError` if there are
    several targets.
    """
    if len(config.targets) != 1 or config.swaps:
        raise UsageError(f"a server serves one target, got {', '.join((*config.targets, *config.swaps))}")
    return config.with_overrides({"learn.enabled": config.learn.enabled and config.serve.learn != "off"})


class ServerRun:
    """An engine over a run's folder. As a context manager it starts the engine, and at its end commits. It keeps texts
    for the drafts of later ones if something learns, or if it `keeps` them always.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        on_event: Callable[[Event], None],
        *,
        resume: bool = False,
        mirror: Mirror | None = None,
        keeps: bool = False,
    ) -> None:
        self._run, self._keeps = RunContext(run_folder, RunKind.SERVE, mirror), keeps
        self._on_event, self.grace_seconds = on_event, GRACE_SECONDS
        self._uri = config.publish.mlflow_uri or mlflow_of(self._run.name)
        if resume and not is_unfinished(run_folder):
            raise RunError(
                f"{self._run.name} must hold the run of a server to resume, but does not; begin one with --run"
            )
        with self._run.acquire(resume=resume):
            self._settings = settle_settings(config, self._uri, resume=resume)
            self.config = derive_serving_config(self._settings)
            self._state: State | None = self._run.snapshot
            (self.models,) = load_models(self.config, self._uri, run_folder.parent / ".fetched")
            self._fingerprints = fingerprints(self.models)
            if self._state and tuple(self._state["models"]) != self._fingerprints:  # before a learner writes anything
                raise RunError(
                    f"the server of {run_folder} must resume with the models that it began with, but has others"
                )

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(self._run.open(self._settings.to_json()))
            write_pair_reports(self._run.folder / VOCABULARY, describe_pairs([self.models]))
            learned = read_learner_checkpoint(self._run.folder)
            self._learner = self._start_learner(learned) if self.config.learn.enabled else None
            if self._learner:
                undo.callback(self._learner.close, 0.0)
            self.engine: LiveEngine = self._build_engine(learned)
            self._state = self._run.snapshot = None  # its content is restored
            del learned
            gc.collect()
            undo.enter_context(freeze_objects())
            self.engine.start()
            self._exit = undo.pop_all()
        return self

    def _start_learner(self, learned: LearnerCheckpoint | None) -> LearnerProcess:
        config, models = self.config, self.models
        learner_config = LearnerConfig(
            config,
            self._run.folder,
            self._uri,
            ((DATASET, "omnidraft serve"),),
            piece_cost(config.draft.costs, [models]),
            tuple(examples_of(config, models)) if config.publish.enabled else (),
            uri_of(Path(self._run.name)),
        )
        share = 0.0 if config.serve.learn == "idle" else CPU_SHARE
        return LearnerProcess(learner_config, share, self._on_event, learned.published if learned else None)

    def _build_engine(self, learned: LearnerCheckpoint | None) -> LiveEngine:
        """Build the engine from the last commits of the server and of its learner, without starting it."""
        config, models, learner, run, state = self.config, self.models, self._learner, self._run, self._state
        drafting = make_drafting(config, models, live=True, keeps=self._keeps or config.learn.enabled)
        queue = RequestQueue(
            models.target_vocabulary,
            models.target.max_length,
            config.serve.waiting,
            config.seed,
            # After a crash of the server the learner may have committed prompts that the server had not.
            max(state["offset"] if state else 0, learned.next_offset if learned else 0),
            coupled=MODES[config.draft.mode].coupled,
            log_text=config.log.text,
            learner_accepts_examples=(lambda: learner.accepts_examples) if learner else (lambda: False),
        )
        clock, follower, text = Clock(perf_counter), self._make_learner(drafting.head, learned), config.log.text
        runner = make_runner(models, drafting, queue.prepare_sequence, follower, clock, queue.on_verdicts, text=text)
        loop = Loop({models.name: runner}, lambda offset: models.name, config.batch, clock)
        if state:
            load_state(loop, state["loop"])
            for prompt in () if learner else completed_prompts(run.folder):
                runner.learner.replay_history(prompt)

        def save() -> State:
            return {"loop": loop.state_dict(rows=False), "offset": queue.next_offset, "models": self._fingerprints}

        run.commit_by(config.commit.seconds, save, self._on_event, text=config.log.text)
        models.target_vocabulary.fewest_tokens(0)  # reads the vocabulary once, before a client waits for it
        conversation, reader = make_conversation(config.source, models), drafting.verify.reader
        parts = models, conversation, queue, loop, runner, run.events, run.committer, learner
        return LiveEngine(*parts, count_threads(), reader, config.serve.model_name)

    def _make_learner(self, head: AcceptanceHead, learned: LearnerCheckpoint | None) -> Learner:
        """Make the loop's side of the learner.

        The weights of the learner's checkpoint are put into service if this server learns live or the earlier one did.
        """
        models, live, versions, before = self.models, self.config.serve.learn in ("live", "idle"), (0, 0), (0, 0)
        if self._state:
            before = self._state["loop"]["runners"][models.name]["learner"]["versions"]
        if learned and (live or any(before)):
            apply_weights(learned.weights, models.drafter, head)
            versions = learned.weights.drafter_version, learned.weights.head_version
        if self._learner:
            return RemoteLearner(self._learner, models.drafter, head, *versions, adopts=live)
        return NoLearner(DriftMonitor(self.config.drift_in_effect), *versions)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._exit:
            self.engine.close(0.0 if kind else self.grace_seconds)
            if self._learner:
                self._learner.close(CRASH_SECONDS if kind else LEARNER_SECONDS)
        if self.engine.failure and not error:
            raise RunError(f"the engine stopped: {self.engine.failure!r}") from self.engine.failure
