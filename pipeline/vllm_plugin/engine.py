"""The plugin's parts put together, for the sources and the run that the settings name."""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import REGISTRY
from typing_extensions import override

from pipeline.event_metrics import EventMetrics
from pipeline.learner_protocol import CompletedPrompt, Epoch, Learner
from pipeline.loop import Clock, Stages, TargetRunner
from pipeline.recorder import Recorder
from pipeline.vllm_plugin.drafter import EngineDrafter, PlainTrials, PromptMaker
from pipeline.vllm_plugin.pass_costs import PassCosts
from pipeline.vllm_plugin.sequences import EngineRow
from pipeline.vllm_plugin.settings import PluginSettings
from stages.choose import ChooseDraft
from stages.contract.blocks import SequenceState
from stages.drafting.costs import CostModel, Costs
from stages.drafting.no_model import NoModel
from stages.drafting.sources import SourceChooser
from stages.learn.examples.top_distributions import LogitsReader
from stages.memory.text_memory import TextMemory, TreeLimits
from stages.ngrams.cache import NgramCache
from stages.ngrams.trie import Trie
from stages.translate import Translate
from stages.verification.judge import Judge
from store.events import Event, PromptCompleted, PromptReceived, TokenDecision

if TYPE_CHECKING:
    from stages.decode import Decode

LOG = logging.getLogger("omnidraft.vllm")
IDLE_SECONDS = 10.0  # after which the requests of the last pass have ended: no pass follows them
GIVEN_DRAFTING_COST = 0.05  # of a drafter pass, relative to the first of the given costs


class EngineFacts(NamedTuple):
    """Facts about the engine and its target."""

    model: str  # name of the target, or the place that it is loaded from
    served: str  # name under which it is served; a label of the counters
    size: int  # number of ids of the target
    longest: int  # maximum number of tokens of a text
    most: int  # maximum number of tokens of a draft
    rows: int  # maximum number of rows of a batch
    ends: frozenset[int]  # token ids after which nothing follows


@dataclass(frozen=True)
class DraftingParts:
    """What depends on whether there is a drafter model."""

    decode: "Decode | NoModel"
    translate: Translate
    judge: Judge  # the last stage
    spell: Callable[[list[int]], list[int]]  # returns the drafter's pieces of a prompt
    teacher_temperature: float = 1.0  # of the distributions that are kept for learning


class NothingLearned(Learner):
    """The learner of an engine whose run keeps nothing."""

    drafter_version = head_version = 0
    epoch = Epoch(0, 0)

    @override
    def on_prompt_completed(self, finished: CompletedPrompt) -> Iterable[Event]:
        return ()


class PluginEngine:
    """Everything of the plugin that is not vLLM's: drafts for the batch, one call per pass.

    Used by one thread; `commit_if_due` and `close` may be called by another. The reader keeps the target's
    distributions; None if nothing needs them. `commit` saves what is due, or with True everything and then closes; by
    default nothing is kept.
    """

    def __init__(
        self,
        drafter: EngineDrafter,
        reader: LogitsReader | None = None,
        commit: Callable[[bool], None] = lambda last: None,
    ) -> None:
        self.drafter, self._reader, self._commit = drafter, reader, commit
        self._lock, self._closed, self._last_pass = threading.Lock(), False, perf_counter()

    def attach(self, target: Any) -> None:
        """Read the target's distributions from now on."""
        if self._reader:
            self._reader.attach(target)

    def begin_pass(self) -> None:
        """Tell that the next logits are those of a pass, and further ones are not, as those of log probabilities of
        prompts. Who never says so gets the last ones before a step.
        """
        if self._reader:
            self._reader.begin_pass()

    def step(self, rows: Sequence[EngineRow], waiting: Collection[str] = (), *, drafts: bool = True) -> list[list[int]]:
        """Learn from a pass and draft for the next one; as `EngineDrafter.step`."""
        with self._lock:
            found = self.drafter.step(rows, self._reader.take() if self._reader else None, waiting, drafts=drafts)
            self._commit(False)
            self._last_pass = perf_counter()
        return found

    def commit_if_due(self) -> bool:
        """Save what is due, while no requests come. Returns False when the engine is closed.

        After a while without a pass all requests have ended; if one continues, it is a new one for the log.
        """
        with self._lock:
            if not self._closed:
                if perf_counter() - self._last_pass > IDLE_SECONDS:
                    self.drafter.finish_all()
                self._commit(False)
            return not self._closed

    def close(self) -> None:
        """Learn the texts of all rows and save everything. May be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.drafter.finish_all()
                self._commit(True)


def make_costs(settings: PluginSettings) -> CostModel:
    """Return the costs that the settings name, or else ones that are measured."""
    given = settings.pass_costs
    if not given:
        return PassCosts()
    return Costs(given, drafter=((1, settings.drafting_cost or GIVEN_DRAFTING_COST * given[0][1]),))


def make_copying_parts(facts: EngineFacts) -> DraftingParts:
    """Return the parts of an engine without a drafter model."""
    trie = Trie(0, 0)
    translate = Translate(trie, NgramCache(trie, 0), ())
    return DraftingParts(NoModel(), translate, Judge(facts.ends), lambda tokens: [])


def build_drafter(
    settings: PluginSettings,
    facts: EngineFacts,
    take: Callable[[Iterable[Event]], None],
    costs: CostModel | None = None,
    parts: DraftingParts | None = None,
    recorder: Recorder | None = None,
    learner: Learner | None = None,
    accepts_examples: Callable[[], bool] = lambda: False,
    decode_text: Callable[[list[int]], str] = lambda tokens: "",
    clock: Clock | None = None,
) -> EngineDrafter:
    """Build what drafts, by default without a drafter model and a run. `accepts_examples` and `decode_text` are as of
    `PromptMaker`.
    """
    costs, parts = costs or make_costs(settings), parts or make_copying_parts(facts)
    recorder, learner = recorder or make_textless_recorder(facts.model, decisions=False), learner or NothingLearned()
    memory = TextMemory(
        costs,
        TreeLimits(nodes=facts.most, width=1, depth=facts.most),  # vLLM verifies chains
        facts.ends,
        own="own" in settings.sources,
        budget_bytes=settings.memory_bytes if "memory" in settings.sources else 0,
        order=settings.order,
    )
    trials = PlainTrials(costs if isinstance(costs, PassCosts) else None)
    chooser, model = SourceChooser(costs), "model" in settings.sources
    choose = ChooseDraft(parts.decode, memory, chooser, costs, model=model, exploration=trials)
    stages = Stages(choose, parts.translate, parts.judge)
    runner = TargetRunner(facts.model, stages, _refuse_prompt, recorder, learner, clock or Clock(perf_counter))
    make = PromptMaker(facts.longest, parts.spell, decode_text, accepts_examples)
    return EngineDrafter(runner, parts.judge, make, trials, chooser, take)


@cache
def _metrics_of(model: str) -> EventMetrics | None:
    """Return the counters of this process; None if another object has registered them."""
    try:
        return EventMetrics(model, REGISTRY)
    except ValueError:
        LOG.warning("counters of omnidraft exist already in this process; those of %s are left out", model)
        return None


def count_event(model: str, event: Event) -> None:
    """Count an event for `/metrics`, and log it as a detail. Texts are in neither."""
    if metrics := _metrics_of(model):
        metrics.count_event(event)
    if not isinstance(event, PromptCompleted | TokenDecision):
        LOG.debug("%s", event)


def _refuse_prompt(prompt: PromptReceived) -> SequenceState:
    raise NotImplementedError("the engine's sequences are made of tokens")


def make_textless_recorder(model: str, *, decisions: bool) -> Recorder:
    """Return what makes events without texts, which needs no tokenizer; where there is no log, without decisions."""
    return Recorder(model, lambda token: None, lambda tokens: "", text=False, decisions=decisions)
