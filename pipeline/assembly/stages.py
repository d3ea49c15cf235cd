"""The stages of one target: how it is drafted for, translated and verified."""

import logging
from dataclasses import dataclass, replace
from functools import partial

from pipeline.assembly.cache import make_cache
from pipeline.assembly.costs import describe, make_costs
from pipeline.assembly.models import DrafterModels, Models
from pipeline.config.sections import DraftSettings, PromptSettings, SamplingSettings
from pipeline.config.settings import Config
from stages.choose import LABELS_AFTER_DRIFT, TRAINED_LABELS_AFTER_DRIFT, ChooseDraft
from stages.decode import Decode
from stages.drafting.costs import CostModel, Costs
from stages.drafting.coupling import Coupling
from stages.drafting.head import AcceptanceHead, load_head
from stages.drafting.selection import Selection
from stages.drafting.sources import Exploration, SourceChooser
from stages.drafting.stopping import CostStop, make_stop_rule
from stages.drafting.target_states import StateProjection, TargetStates
from stages.engine.models.huggingface import MAKING_MODULES
from stages.learn.examples.teacher import TrieTeacher
from stages.memory.text_memory import MEMORY_FILE, TextMemory, TreeLimits, read_memory
from stages.ngrams.cache import NgramCache
from stages.ngrams.trie import Trie, build_direct_trie
from stages.prompts.prefix_cache import PrefixCache
from stages.prompts.prompt_reader import PromptReader
from stages.sampling.params import SamplingParams
from stages.translate import Translate
from stages.verification.rules import MODES
from stages.verify import Verify
from stages.vocabulary.chat import Ids
from stages.vocabulary.pair import Pair
from store.events import Action

LOG = logging.getLogger("omnidraft.models")

HEAD_FILE = "head.safetensors"
CHUNK = 128  # prompt tokens that a model reads at once: more take memory and hardly save time
NODES, DEPTH = 16, 12  # candidates of a tree, and of one path: more cost time to verify and are rarely emitted
WHOLE = 1 << 30  # prompt tokens that a model without parts of rows reads at once: all
LIVE_BLOCK = 16  # tokens of a block of a server's prefix cache
TOP_K = 64  # likeliest target tokens of a place that are soft targets: the others have hardly any probability
SHARPEST_TEACHER = 0.5  # temperature of the distributions that teach greedy drafting


@dataclass(frozen=True)
class Drafting:
    """The three stages of a block, what of them is saved with a version, and the costs in seconds if remembered."""

    decode: ChooseDraft
    translate: Translate
    verify: Verify
    trie: Trie
    cache: NgramCache
    head: AcceptanceHead
    seconds: Costs | None


def draftable(draft: DraftSettings, words: Pair) -> set[int]:
    """The pieces that may be drafted in the configured mode."""
    return MODES[draft.mode].draftable_pieces(words.pieces)


def make_sampling_params(settings: SamplingSettings) -> SamplingParams:
    """The sampling parameters of the settings: of all prompts, or the defaults of requests."""
    return SamplingParams(settings.temperature, settings.top_k, settings.top_p, max_tokens=settings.max_new_tokens)


def make_drafting(
    config: Config,
    models: Models,
    shared_with: Drafting | None = None,
    *,
    preamble: Ids = ([], []),
    teacher: TrieTeacher | None = None,
    live: bool = False,
    keeps: bool = True,
) -> Drafting:
    """The stages of a block over loaded models. The forward passes and costs in use are logged as details.

    Args:
        shared_with: the stages of a target with the same vocabulary, whose n-grams this one shares.
        preamble: ids of the target and of the drafter with which prompts begin.
        teacher: selects soft targets; by default as configured, if anything learns.
        live: whether the prompts are requests, which are never decoded again.
        keeps: whether texts are kept for the drafts of later ones. Without it, of past blocks only costs that are
            tracked change the choice of a draft.
    """
    draft, learns, device = config.draft, config.learn.enabled, models.target.device
    head, mode, params = make_head(models, config.seed), MODES[draft.mode], make_sampling_params(config.sampling)
    sizes = models.target.vocabulary_size, models.drafter.vocabulary_size
    trie = shared_with.trie if shared_with else build_direct_trie(models.pair.pieces, *sizes, device)
    cache = shared_with.cache if shared_with else make_cache(config.cache, mode, models, trie)
    states = models.drafter.extra if isinstance(models.drafter.extra, TargetStates) else None

    translate = Translate(trie, cache, models.pair.pieces, mode.parse, keeps=keeps)
    verify = Verify(
        models.target,
        mode.make_rule(trie, models.pair.pieces),
        params,
        models.pair.context,
        models.target_vocabulary.size,
        models.eos_ids,
        teacher or (make_teacher(models, params.temperature) if learns else None),
        project=states and StateProjection(models.name, models.target.hidden_size),
        reads_states=partial(states.is_read, models.name) if states else lambda: False,
    )
    costs, seconds = make_costs(draft, params, config.batch, models)
    LOG.debug("%s", describe(models, costs, config.batch), extra={"target": models.name})
    usable = head.came_trained or learns
    decode = make_decode(draft, params, models, head, costs, trie, usable=usable, trees=models.target.reads_trees)
    translate.selection = decode.selection
    decode.reader, verify.reader = _make_readers(config.prompts, models, preamble, live=live)
    memory = _make_memory(draft, config.memory.budget_bytes, models, costs, keeps=keeps)
    model = "model" in draft.sources
    actions = (Action.NOTHING, Action.COPIES, *((Action.MODEL,) if model else ()))
    choose = ChooseDraft(
        decode,
        memory,
        SourceChooser(costs, config.batch, may_rest=draft.pause),
        costs,
        model=model,
        exploration=Exploration(draft.exploration, config.seed, actions),
        labels_after_drift=TRAINED_LABELS_AFTER_DRIFT if head.came_trained else LABELS_AFTER_DRIFT,
        keeps=keeps or draft.costs == "tracked",
    )
    return Drafting(choose, translate, verify, trie, cache, head, seconds)


def make_decode(
    draft: DraftSettings,
    params: SamplingParams,
    models: DrafterModels,
    head: AcceptanceHead,
    costs: CostModel,
    trie: Trie,
    *,
    usable: bool,
    trees: bool,
) -> Decode:
    """Make the drafting of the model. Its head is `usable` if it has learned or will learn; `trees`: whether the target
    reads token trees.
    """
    rule = make_stop_rule(draft.stop, costs)
    most = draft.max_draft if "model" in draft.sources else 0
    if draft.temperature is not None:
        params = replace(params, temperature=draft.temperature)
    states = models.drafter.extra if isinstance(models.drafter.extra, TargetStates) else None
    decode = Decode(
        models.drafter,
        head,
        rule,
        params,
        draftable(draft, models.pair),
        most,
        models.drafter_vocabulary.eos,
        state_logits=states and partial(states.compute_logits, models.name),
    )
    decode.trusts_head, decode.coupling = usable, Coupling(trie, models.pair.pieces)
    alternatives = draft.width - 1 if trees and draft.mode in ("trie", "coupled", "match") else 0
    drops = isinstance(rule, CostStop)
    decode.selection = Selection(costs, trie, MODES[draft.mode].parse, alternatives, drops=drops)
    return decode


def make_teacher(models: DrafterModels, temperature: float) -> TrieTeacher:
    """Make what selects the target's likeliest tokens as soft targets, given the target's temperature."""
    return TrieTeacher(models.pair, TOP_K, temperature=max(SHARPEST_TEACHER, temperature))


def _make_readers(
    settings: PromptSettings, models: Models, preamble: Ids, *, live: bool
) -> tuple[PromptReader | None, PromptReader | None]:
    """The drafter's and the target's readers of prompts, whose known prefixes share a budget. A model whose cached rows
    cannot be cut reads prompts in one pass: without a reader, or that of a server's target in a pass of a block.
    """
    target, drafter = models.target, models.drafter
    block = LIVE_BLOCK if live else CHUNK
    cache = PrefixCache(settings.cache_bytes, block, shared=settings.share_tenants) if settings.cache_bytes else None
    of_pieces = cache.for_other_model(CHUNK) if cache else None
    (tokens, pieces), cuts = preamble, target.forward_pass.cuts_rows
    return (
        PromptReader(drafter, CHUNK, of_pieces, preamble=pieces, text=lambda row: row.pieces)
        if drafter.forward_pass.cuts_rows
        else None,
        PromptReader(target, CHUNK if cuts else WHOLE, cache if cuts else None, live=live, preamble=tokens)
        if cuts or live
        else None,
    )


def _make_memory(
    draft: DraftSettings, budget_bytes: int, models: Models, costs: CostModel, *, keeps: bool
) -> TextMemory:
    """Make the sources that propose target tokens, where drafts are wanted and the mode allows them."""
    usable = draft.max_draft > 0 and MODES[draft.mode].copies
    memory = TextMemory(
        costs,
        TreeLimits(NODES, draft.width if models.target.reads_trees else 1, DEPTH),
        models.eos_ids,
        own=usable and "own" in draft.sources,
        budget_bytes=budget_bytes if usable and "memory" in draft.sources else 0,
        keeps=keeps,
    )
    saved = models.drafter_folder / MEMORY_FILE if models.drafter_folder else None
    if saved is not None and saved.is_file():
        read_memory(saved, memory, models.pair.digest)
    return memory


def make_head(models: DrafterModels, seed: int) -> AcceptanceHead:
    """The acceptance head: that of the drafter's folder, or a new one."""
    with MAKING_MODULES:  # a model that another thread loads meanwhile would give the head its type
        head = AcceptanceHead(models.drafter.hidden_size, seed).to(models.drafter.device)
    saved = models.drafter_folder / HEAD_FILE if models.drafter_folder else None
    if saved is not None and saved.is_file():
        load_head(head, saved)
    return head
