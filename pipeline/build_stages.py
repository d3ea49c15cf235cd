"""The stages of one target: how it is drafted for, translated and verified."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.build_cache import make_cache
from pipeline.build_models import Models
from pipeline.config import Config
from stages.acceptance import PaperRule, Rule, TrieRule, as_certain, as_drawn
from stages.decode import Decode
from stages.distributions import Sampling
from stages.head import AcceptanceHead, CostStop, FixedLength, StopRule, ThresholdStop, load_head
from stages.ngram_cache import Cache
from stages.pair import Pair
from stages.teach import PushDown, teach_nothing
from stages.translate import Translate
from stages.trie import Trie, trie_of_direct_maps
from stages.verify import Verify

HEAD_FILE = "head.safetensors"
LAYER_OVERHEAD = 2e5  # what entering one layer costs beside its weights, in parameters
SHARPEST_TEACHER = 0.5  # temperature of the laws that teach greedy drafting
VERIFY_SHARE = 0.05  # what one more verified token adds to a target pass where memory is the bound
# On a CPU arithmetic soon is the bound: measured on two built-in pairs at batch 1 and 8.
CPU_VERIFY_SHARE, CPU_VERIFY_SHARE_PER_ROW = 0.06, 0.027


@dataclass(frozen=True)
class Drafting:
    """The three stages of a block, and what of them is saved with a version."""

    decode: Decode
    translate: Translate
    verify: Verify
    trie: Trie
    cache: Cache
    head: AcceptanceHead


def relative_cost(config: Config, models: Models) -> float:
    """Cost of drafting and verifying one more piece, in target passes.

    Estimated from sizes, not measured, so that equal seeds make equal decisions; `draft.relative_cost` overrides it.
    """
    if config.draft.relative_cost is not None:
        return config.draft.relative_cost
    sizes = [model.parameters + LAYER_OVERHEAD * model.layers for model in (models.drafter, models.target)]
    on_cpu = models.target.device.type == "cpu"
    verify = CPU_VERIFY_SHARE + CPU_VERIFY_SHARE_PER_ROW * (config.batch - 1) if on_cpu else VERIFY_SHARE
    return sizes[0] / sizes[1] + verify


def _stop_rule(config: Config, models: Models, head_is_trained: bool) -> StopRule:
    """The configured rule. A head that neither has learned nor will learn decides nothing."""
    usable = head_is_trained or config.learn.enabled
    if not config.draft.adapt or config.draft.stop_rule == "never" or not usable:
        return FixedLength()
    if config.draft.stop_rule == "threshold":
        return ThresholdStop(config.draft.stop_threshold)
    return CostStop(relative_cost(config, models))


def _rule(config: Config, models: Models, trie: Trie) -> Rule:
    if config.draft.mode == "paper":
        spelt = [*models.pair.pieces, *[None] * (models.target.vocabulary_size - len(models.pair.pieces))]
        missing = models.drafter.vocabulary_size
        direct = [pieces[0] if pieces and len(pieces) == 1 else missing for pieces in spelt]
        return PaperRule(direct, models.target.device)
    return TrieRule(trie, as_certain if config.draft.mode == "match" else as_drawn)


def draftable(config: Config, words: Pair) -> set[int]:
    """The pieces that may be drafted: those that spell target tokens; in `tli` mode the direct maps alone."""
    longest = 1 if config.draft.mode == "tli" else math.inf
    return {piece for pieces in words.pieces if pieces and len(pieces) <= longest for piece in pieces}


def make_drafting(
    config: Config, models: Models, notice: Callable[[str], None], kin: Drafting | None = None
) -> Drafting:
    """The stages of a block over loaded models.

    Args:
        config: all settings.
        models: one target with the drafter.
        notice: is told what the user should know.
        kin: the stages of a target with the same vocabulary, whose n-grams this one goes on with.
    """
    head, head_is_trained = _head(config, models)
    learn, settings, device = config.learn, config.sampling, models.target.device
    sizes = models.target.vocabulary_size, models.drafter.vocabulary_size
    trie = kin.trie if kin else trie_of_direct_maps(models.pair.pieces, *sizes, device)
    cache = kin.cache if kin else make_cache(config, models, trie, notice)
    warmth = settings.temperature if config.draft.temperature is None else config.draft.temperature
    decode = Decode(
        models.drafter,
        head,
        _stop_rule(config, models, head_is_trained),
        Sampling(warmth, settings.top_k, settings.top_p),
        draftable(config, models.pair),
        config.draft.max_draft,
        models.drafter_words.eos,
    )
    teach = PushDown(
        models.pair,
        learn.teacher_top,
        device,
        temperature=learn.teacher_temperature or max(SHARPEST_TEACHER, settings.temperature),
        off_policy=learn.off_policy,
    )
    verify = Verify(
        models.target,
        _rule(config, models, trie),
        Sampling(settings.temperature, settings.top_k, settings.top_p),
        models.pair.context,
        models.target_words.size,
        models.target.ends or {token for token in (models.target_words.eos,) if token is not None},
        teach if learn.enabled else teach_nothing,
    )
    translate = Translate(trie, cache, models.pair.pieces, longest=config.draft.mode == "paper")
    return Drafting(decode, translate, verify, trie, cache, head)


def _head(config: Config, models: Models) -> tuple[AcceptanceHead, bool]:
    """The acceptance head, and whether it came with the drafter."""
    head = AcceptanceHead(models.drafter.hidden_size, config.seed).to(models.drafter.device)
    saved = models.drafter_folder / HEAD_FILE if models.drafter_folder else None
    if saved is None or not saved.is_file():
        return head, False
    load_head(head, saved)
    return head, True
