"""The stages of one target: how it is drafted for, translated and verified."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.build_cache import make_cache
from pipeline.build_costs import costs_of, describe, make_paying, make_stop_rule
from pipeline.build_models import DrafterModels, Models
from pipeline.config import Config
from stages.acceptance import PaperRule, Rule, TrieRule, as_certain, as_drawn
from stages.costs import Costs
from stages.decode import Decode
from stages.distributions import Sampling
from stages.head import AcceptanceHead, load_head
from stages.lookup import DecodeOrLookup, Payoff
from stages.ngram_cache import Cache
from stages.pair import Pair
from stages.stopping import AlwaysDraft, FixedLength, Paying, StopRule
from stages.teach import PushDown, teach_nothing
from stages.translate import Translate
from stages.trie import Trie, trie_of_direct_maps
from stages.verify import Verify

HEAD_FILE = "head.safetensors"
PROBE_DRAFT = 4  # pieces of the drafts that are timed
SHARPEST_TEACHER = 0.5  # temperature of the laws that teach greedy drafting


@dataclass(frozen=True)
class Drafting:
    """The three stages of a block, and what of them is saved with a version."""

    decode: Decode | DecodeOrLookup
    translate: Translate
    verify: Verify
    trie: Trie
    cache: Cache
    head: AcceptanceHead


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
    head, head_is_trained = make_head(config, models)
    learn, settings, device = config.learn, config.sampling, models.target.device
    sizes = models.target.vocabulary_size, models.drafter.vocabulary_size
    trie = kin.trie if kin else trie_of_direct_maps(models.pair.pieces, *sizes, device)
    cache = kin.cache if kin else make_cache(config, models, trie, notice)
    warmth = settings.temperature if config.draft.temperature is None else config.draft.temperature

    allowed = draftable(config, models.pair)

    def drafting(stop_rule: StopRule, max_draft: int, paying: Paying, end: int | None) -> Decode:
        transform = Sampling(warmth, settings.top_k, settings.top_p)
        return Decode(models.drafter, head, stop_rule, transform, allowed, max_draft, end, paying=paying)

    costs = costs_of(config, models, len(allowed), lambda: drafting(FixedLength(), PROBE_DRAFT, AlwaysDraft(), None))
    notice(describe(models, costs, config.batch))
    rule = make_stop_rule(config, costs, usable=head_is_trained or learn.enabled)
    decode = drafting(rule, config.draft.max_draft, make_paying(config, costs), models.drafter_words.eos)
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
    return Drafting(_with_lookup(config, decode, costs, allowed), translate, verify, trie, cache, head)


def _with_lookup(config: Config, decode: Decode, costs: Costs, allowed: set[int]) -> Decode | DecodeOrLookup:
    """Lookup beside the model, where drafts are wanted and the rule is exact."""
    if not config.draft.lookup or not config.draft.max_draft or config.draft.mode == "paper":
        return decode
    size = decode.model.vocabulary_size
    return DecodeOrLookup(decode, Payoff(costs, config.batch), allowed, size, config.draft.max_lookup)


def make_head(config: Config, models: DrafterModels) -> tuple[AcceptanceHead, bool]:
    """The acceptance head, and whether it came with the drafter."""
    head = AcceptanceHead(models.drafter.hidden_size, config.seed).to(models.drafter.device)
    saved = models.drafter_folder / HEAD_FILE if models.drafter_folder else None
    if saved is None or not saved.is_file():
        return head, False
    load_head(head, saved)
    return head, True
