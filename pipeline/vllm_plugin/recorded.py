"""An engine with a run: its log and its memory lie in a folder, from which the next engine continues.

RUN/config.json         the settings
RUN/log/                decisions, blocks, prompts, drifts; those of the learner in its partition
RUN/checkpoint/         the memory, the chances of its candidates, what chooses the source
RUN/versions/           versions of the drafter, if it learns
RUN/partitions/         the log and the checkpoint of the learner

Each data-parallel replica has a run of its own (`find_run` in host.py); the versions of all are in one registry.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from time import perf_counter

from pipeline.assembly.cache import make_cache
from pipeline.assembly.models import DrafterModels, load_drafter_models, load_vocabulary
from pipeline.assembly.stages import CHUNK, make_decode, make_head, make_sampling_params, make_teacher
from pipeline.config.settings import Config
from pipeline.learner_service.process import LearnerProcess
from pipeline.learner_service.service import LearnerConfig, read_learner_checkpoint
from pipeline.learning.drift import DriftMonitor
from pipeline.learning.local_learner import FollowingLearner, NoLearner
from pipeline.learning.remote_learner import RemoteLearner
from pipeline.loop import Clock, Loop
from pipeline.recorder import Recorder
from pipeline.run.context import RunContext
from pipeline.run.folder import RUNS, is_unfinished, mlflow_of
from pipeline.vllm_plugin.drafter import DATASET, EngineDrafter
from pipeline.vllm_plugin.engine import (
    DraftingParts,
    EngineFacts,
    PluginEngine,
    build_drafter,
    count_event,
    make_copying_parts,
    make_costs,
    make_textless_recorder,
)
from pipeline.vllm_plugin.settings import PluginSettings
from stages.choose import ChooseDraft
from stages.contract.blocks import SequenceState, TopLogits
from stages.contract.snapshot import State, load_state
from stages.drafting.costs import CostModel
from stages.drafting.head import AcceptanceHead
from stages.learn.examples.teacher import TrieTeacher
from stages.learn.examples.top_distributions import LogitsReader, TopDistributions
from stages.learn.training.weight_update import apply_weights
from stages.ngrams.trie import build_direct_trie
from stages.prompts.prefix_cache import PrefixCache
from stages.prompts.prompt_reader import PromptReader
from stages.translate import Translate
from stages.verification.judge import Judge, Supervise
from stages.verification.rules import MODES
from stages.vocabulary.chat import DrafterEncoder
from store.errors import RunError
from store.events import Event
from store.log.manifest import RunKind
from store.log.parts import completed_prompts

LEARNER_SHARE = 1.0  # of a core: the learner never sleeps
LEARNER_SECONDS = 30.0  # for the learner's last commit when the engine ends


def derive_config(settings: PluginSettings, facts: EngineFacts) -> Config:
    """Return the settings of the run."""
    config = Config.from_mapping(
        {
            "targets": (facts.model,),
            "drafter": settings.drafter,
            "run": settings.run,
            "batch": facts.rows,
            "sampling": {"temperature": 0.0},  # of drafts
            "draft": {"mode": "match", "sources": settings.sources, "max_draft": facts.most, "width": 1},
            "memory": {"budget_bytes": settings.memory_bytes},
            "learn": {"enabled": settings.learn},
            "publish": {"enabled": settings.learn, "mlflow_uri": settings.mlflow_uri},
            "log": {"text": settings.log_text},
            "commit": {"seconds": settings.commit_seconds},
        }
    )
    return config.with_overrides(settings.set)


def build_recorded(settings: PluginSettings, facts: EngineFacts) -> PluginEngine:
    """Build an engine with a run, with a drafter model, or with both."""
    with ExitStack() as undo:
        builder = _Builder(settings, facts, undo)
        engine = builder.build()
        builder.exit = undo.pop_all()
    return engine


class _Builder:
    """Builds the engine. `exit` closes what was opened."""

    def __init__(self, settings: PluginSettings, facts: EngineFacts, exit_stack: ExitStack) -> None:
        self._settings, self._facts, self.exit = settings, facts, exit_stack
        self._config = derive_config(settings, facts)
        folder = settings.run.resolve() if settings.run else None
        self._run = RunContext(folder, RunKind.ENGINE) if folder else None
        self._folder = folder or RUNS
        self._fetched = self._folder.parent / ".fetched"
        self._uri = settings.mlflow_uri or mlflow_of(str(self._folder))
        self._learning: LearnerProcess | None = None
        self._reader: LogitsReader | None = None
        self._show = partial(count_event, facts.served)
        self._first_offset = 0  # after all prompts that the learner received

    def build(self) -> PluginEngine:
        """Build the engine over the run as it was left, or over a new one."""
        if self._run is None:
            return self._build(None)
        with self._run.acquire(resume=is_unfinished(self._run.folder)):
            state = self._run.snapshot
            if state and state["model"] != self._facts.model:
                raise RunError(
                    f"{self._folder} must be the run of {self._facts.model}, but is that of {state['model']}; name "
                    "another folder with OMNIDRAFT_VLLM_RUN"
                )
            self.exit.enter_context(self._run.open(self._config.to_json()))
        engine = self._build(state)
        self._run.snapshot = None  # its content is restored
        return engine

    def _build(self, state: State | None) -> PluginEngine:
        settings, facts, clock = self._settings, self._facts, Clock(perf_counter)
        costs = make_costs(settings)
        models, head, parts = None, None, make_copying_parts(facts)
        if "model" in settings.sources:
            models, head, parts = self._load_parts(costs)
        learner = self._make_learner(models, head)
        recorder, decode = self._make_recorder(models)
        if self._run:
            self._reader = LogitsReader(facts.size, parts.teacher_temperature)
        drafter = build_drafter(
            settings,
            facts,
            self._take,
            costs,
            parts,
            recorder,
            learner,
            lambda: self._learning is not None and self._learning.accepts_examples,
            decode,
            clock,
        )
        loop = Loop({facts.model: drafter.runner}, lambda offset: facts.model, facts.rows, clock)
        self._restore(state, drafter, loop)
        if self._run:
            self._run.commit_by(
                self._config.commit.seconds, partial(self._save, loop, drafter), self._show, text=self._config.log.text
            )
        return PluginEngine(drafter, self._reader, self._commit)

    def _load_parts(self, costs: CostModel) -> tuple[DrafterModels, AcceptanceHead, DraftingParts]:
        """Load the drafter and build the stages that use it."""
        config = self._config
        models = load_drafter_models(config, self._uri, self._fetched, decodes=True)
        head = make_head(models, config.seed)
        mode, pair = MODES[config.draft.mode], models.pair
        trie = build_direct_trie(pair.pieces, len(pair.pieces), models.drafter.vocabulary_size, models.drafter.device)
        decode = make_decode(
            config.draft,
            make_sampling_params(config.sampling),
            models,
            head,
            costs,
            trie,
            usable=head.came_trained or config.learn.enabled,
            trees=False,  # vLLM verifies chains
        )
        if models.drafter.forward_pass.cuts_rows:
            prefixes = PrefixCache(config.prompts.cache_bytes, CHUNK) if config.prompts.cache_bytes else None
            decode.reader = PromptReader(models.drafter, CHUNK, prefixes, text=lambda row: row.pieces)
        teacher = make_teacher(models, config.sampling.temperature)
        judge = Judge(
            self._facts.ends,
            pair.context,
            mode.make_rule(trie, pair.pieces),
            _supervise_by(teacher) if config.learn.enabled else None,
        )
        cache = make_cache(config.cache, mode, models, trie)
        translate = Translate(trie, cache, pair.pieces, mode.parse)
        translate.selection = decode.selection
        encoder = DrafterEncoder(models.target_vocabulary, models.drafter_vocabulary, models.pair)

        def spell(tokens: list[int]) -> list[int]:
            return models.clip_prompt(encoder.encode_tokens(tokens))

        return models, head, DraftingParts(decode, translate, judge, spell, teacher.temperature)

    def _make_recorder(self, models: DrafterModels | None) -> tuple[Recorder, Callable[[list[int]], str]]:
        """Return what makes events, and what returns the text of a prompt; without texts, no tokenizer is loaded."""
        if self._run is None or not self._config.log.text:
            return make_textless_recorder(self._facts.model, decisions=self._run is not None), lambda tokens: ""
        vocabulary = (
            models.target_vocabulary
            if models
            else load_vocabulary(self._facts.model, self._config.publish, self._fetched)
        )
        return Recorder(self._facts.model, vocabulary.bytes_of, vocabulary.decode), vocabulary.decode

    def _make_learner(self, models: DrafterModels | None, head: AcceptanceHead | None) -> FollowingLearner:
        """Return the learner; if the drafter learns, in a process of its own, which continues from its last commit."""
        if models is None or head is None or not self._settings.learn:
            return NoLearner(DriftMonitor(self._config.drift_in_effect))
        checkpoint, versions = read_learner_checkpoint(self._folder), (0, 0)
        if checkpoint:
            apply_weights(checkpoint.weights, models.drafter, head)
            versions = checkpoint.weights.drafter_version, checkpoint.weights.head_version
            self._first_offset = checkpoint.next_offset
        learned = LearnerConfig(
            self._config.with_overrides({"device": "cpu"}),  # the engine fills the accelerator
            self._folder,
            self._uri,
            ((DATASET, self._facts.model),),
            0.0,  # the learner has a core of its own
            (),
        )
        published = checkpoint.published if checkpoint else None
        self._learning = LearnerProcess(learned, LEARNER_SHARE, self._show, published)
        return RemoteLearner(self._learning, models.drafter, head, *versions)

    def _take(self, events: Iterable[Event]) -> None:
        if self._run:
            self._run.events.take(events)
        else:
            for event in events:
                self._show(event)

    def _save(self, loop: Loop, drafter: EngineDrafter) -> State:
        return {
            "loop": loop.state_dict(rows=False),
            "offset": drafter.make.offset,  # of the next request
            "model": self._facts.model,
            "drafts_with": [*self._settings.sources, self._settings.drafter],
        }

    def _restore(self, state: State | None, drafter: EngineDrafter, loop: Loop) -> None:
        """Continue from the last commit. With other sources or another drafter, only the memory is kept."""
        drafter.make.offset = max(self._first_offset, state["offset"] if state else 0)
        if state is None:
            return
        *sources, model = state["drafts_with"]
        if (tuple(sources), model) == (self._settings.sources, self._settings.drafter):
            load_state(loop, state["loop"])
        else:
            loop.clock.resume(state["loop"]["seconds"])
            choose = drafter.runner.stages.decode
            if isinstance(choose, ChooseDraft) and {"memory"} <= {*sources} & {*self._settings.sources}:
                stages = state["loop"]["runners"][self._facts.model]["stages"]
                choose.memory.load_state_dict(stages[0]["memory"])
        if not self._settings.learn:
            for prompt in completed_prompts(self._folder):
                drafter.runner.learner.replay_history(prompt)

    def _commit(self, last: bool) -> None:  # a callback
        """Commit if it is due; at the end commit all, and close the run and the learner."""
        run = self._run
        if run and (last or (run.events.dirty and run.committer.is_due())):
            run.commit(wait=last)
            run.events.dirty = False
        if last:
            if self._learning:
                self._learning.close(LEARNER_SECONDS)
            self.exit.close()


def _supervise_by(teacher: TrieTeacher) -> Supervise:
    def supervise(row: SequenceState, emitted: tuple[int, ...], top: TopDistributions) -> TopLogits:
        lines = top.select(0, len(emitted))
        return teacher.keep(len(row.pieces), emitted, lines.ids_NK, lines.logits_NK, lines.sums_N1)

    return supervise
