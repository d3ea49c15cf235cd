"""From a configuration to a pipeline that runs: the only place that constructs stages."""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeline import zoo
from pipeline.config import Config
from pipeline.drift import DriftWatch, Rates
from pipeline.loop import Loop, Stages, UnfitPromptError
from pipeline.publish import FolderPublisher, NoPublisher, Origin, Publisher
from pipeline.records import Recorder, Versions
from stages.acceptance import PaperRule, Rule, TrieRule, as_certain, as_drawn
from stages.blocks import Row
from stages.decode import Decode
from stages.distill import Distill, NoDistill, Schedule
from stages.distributions import Sampling
from stages.drafter_trainer import DrafterTrainer, Training
from stages.draws import SeededDraws
from stages.head import AcceptanceHead, CostStop, FixedLength, StopRule, ThresholdStop, load_head, save_head
from stages.head_trainer import HeadTrainer
from stages.huggingface import load_tokenizer, pick_device, set_threads
from stages.language_model import LanguageModel, load_model
from stages.losses import (
    Loss,
    acceptance_loss,
    direct_loss,
    expected_acceptance,
    greedy_agreement,
    hybrid_loss,
    trie_loss,
)
from stages.ngram_cache import EVICTIONS, Entry, NgramCache
from stages.teach import PushDown, teach_nothing
from stages.translate import Translate
from stages.trie import Trie
from stages.verify import Verify
from stages.vocabulary import Pair, Vocabulary, pair
from store.errors import VocabularyError
from store.events import PromptReceived
from store.ngram_file import read_ngrams, write_ngrams
from store.registry import Registry, fetch_version

HEAD_FILE, NGRAM_FILE = "head.safetensors", "ngrams.parquet"
LAYER_OVERHEAD = 2e6  # what entering one layer costs beside its weights, in parameters: about 0.3 ms at 26 GB/s
VERIFY_SHARE = 0.05  # what one more verified token adds to a target pass


@dataclass(frozen=True)
class Models:
    """The two models with their vocabularies, as loaded."""

    target: LanguageModel
    drafter: LanguageModel
    target_words: Vocabulary
    drafter_words: Vocabulary
    drafter_tokenizer: Any
    drafter_folder: Path | None  # where the drafter's head and n-grams may lie
    pair: Pair


def locate(name: str, uri: str, fetched: Path) -> str:
    """The hub name or folder behind a model's name: `builtin:NAME`, `models:/NAME/VERSION`, or what was given."""
    if name.startswith("builtin:"):
        return str(zoo.path_of(name.removeprefix("builtin:")))
    if name.startswith("models:/"):
        folder = fetched / re.sub(r"[^\w.-]+", "_", name.removeprefix("models:/"))
        shutil.rmtree(folder, ignore_errors=True)  # an alias may have moved
        return str(fetch_version(name, uri, folder))
    return name


def load_models(config: Config, uri: str, fetched: Path) -> Models:
    """Load both models and pair their vocabularies. What comes from the registry is copied below `fetched`.

    Raises:
        ModelError, VocabularyError: see there.
    """
    if config.threads:
        set_threads(config.threads)
    device = pick_device(config.device)
    target_source, drafter_source = (locate(name, uri, fetched) for name in (config.target, config.drafter))
    target_tokenizer, drafter_tokenizer = load_tokenizer(target_source), load_tokenizer(drafter_source)
    target_words = Vocabulary(target_tokenizer, config.target)
    drafter_words = Vocabulary(drafter_tokenizer, config.drafter)
    return Models(
        target=load_model(target_source, config.dtype, device),
        drafter=load_model(drafter_source, config.dtype, device),
        target_words=target_words,
        drafter_words=drafter_words,
        drafter_tokenizer=drafter_tokenizer,
        drafter_folder=Path(drafter_source) if Path(drafter_source).is_dir() else None,
        pair=pair(target_words, drafter_words),
    )


def relative_cost(config: Config, models: Models) -> float:
    """Cost of drafting and verifying one more piece, in target passes.

    Estimated from sizes, not measured, so that equal seeds make equal decisions; `draft.relative_cost` overrides it.
    """
    if config.draft.relative_cost is not None:
        return config.draft.relative_cost
    sizes = [model.parameters + LAYER_OVERHEAD * model.layers for model in (models.drafter, models.target)]
    return sizes[0] / sizes[1] + VERIFY_SHARE


def _stop_rule(config: Config, models: Models, head_is_trained: bool) -> StopRule:
    """The configured rule. A head that neither has learned nor will learn decides nothing."""
    usable = head_is_trained or config.learn.enabled
    if not config.draft.adapt or config.draft.stop_rule == "never" or not usable:
        return FixedLength()
    if config.draft.stop_rule == "threshold":
        return ThresholdStop(config.draft.stop_threshold)
    return CostStop(relative_cost(config, models))


def _trie(models: Models) -> Trie:
    """The direct maps."""
    trie = Trie(models.target.vocabulary_size, models.drafter.vocabulary_size, models.target.device)
    entries = ((pieces, token) for token, pieces in enumerate(models.pair.pieces) if pieces and len(pieces) == 1)
    trie.insert_all(entries)
    return trie


def _cache(config: Config, models: Models, trie: Trie, notice: Callable[[str], None]) -> NgramCache:
    """An n-gram cache, filled as configured. In `tli` mode one without any budget: direct maps only."""
    budget = 0 if config.draft.mode == "tli" else config.cache.budget_bytes
    cache = NgramCache(trie, budget, EVICTIONS[config.cache.policy]())
    if config.cache.seed_entries:
        ngrams = [(pieces, token) for token, pieces in enumerate(models.pair.pieces) if pieces and len(pieces) > 1]
        cache.load(Entry(pieces, token, 1) for pieces, token in ngrams)
    saved = models.drafter_folder / NGRAM_FILE if models.drafter_folder else None
    if saved and saved.is_file():
        try:
            cache.load(Entry(*ngram) for ngram in read_ngrams(saved, models.pair.digest))
        except VocabularyError as error:
            notice(f"the n-gram cache of the drafter is left out: {error}")
    return cache


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


def _loss(config: Config) -> Loss:
    losses: dict[str, Loss] = {
        "trie": trie_loss,
        "direct": direct_loss,
        "hybrid": hybrid_loss(config.learn.ngram_weight),
        "acceptance": acceptance_loss(config.learn.acceptance_blend),
    }
    return losses[config.learn.loss]


def _distill(config: Config, models: Models, head: AcceptanceHead) -> Distill | NoDistill:
    learn = config.learn
    if not learn.enabled:
        return NoDistill()
    training = Training(
        rate=learn.rate,
        weight_decay=learn.weight_decay,
        steps=learn.steps,
        clip=learn.clip,
        replay=learn.replay_prompts,
        gate_window=learn.gate_window,
        gate_tolerance=learn.gate_tolerance,
        seed=config.seed,
    )
    measure = greedy_agreement if config.sampling.temperature == 0 else expected_acceptance
    allowed = draftable(config, models.pair)
    drafter = DrafterTrainer(models.drafter, learn.loss, _loss(config), measure, allowed, training)
    trained_head = HeadTrainer(head, config.seed, learn.head_rate, learn.head_batch, learn.head_buffer)
    gate_every = round(1 / learn.gate_share) if learn.gate_share else 1 << 62
    return Distill(drafter, trained_head, Schedule(learn.interval, learn.head_schedule == "interleaved", gate_every))


def build_stages(
    config: Config, models: Models, notice: Callable[[str], None]
) -> tuple[Stages, NgramCache, AcceptanceHead]:
    """All four stages over loaded models. `notice` is told what the user should know."""
    head = AcceptanceHead(models.drafter.hidden_size, config.seed).to(models.drafter.device)
    saved_head = models.drafter_folder / HEAD_FILE if models.drafter_folder else None
    head_is_trained = saved_head is not None and saved_head.is_file()
    if saved_head and head_is_trained:
        load_head(head, saved_head)
    settings, trie = config.sampling, _trie(models)
    cache = _cache(config, models, trie, notice)
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
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
    teach = PushDown(models.pair, config.learn.teacher_top, models.target.device)
    verify = Verify(
        models.target,
        _rule(config, models, trie),
        sampling,
        models.pair.context,
        models.target_words.size,
        models.target.ends or {token for token in (models.target_words.eos,) if token is not None},
        teach if config.learn.enabled else teach_nothing,
    )
    translate = Translate(trie, cache, models.pair.pieces, longest=config.draft.mode == "paper")
    return Stages(decode, translate, verify, _distill(config, models, head)), cache, head


def _prepare(config: Config, models: Models) -> Callable[[PromptReceived], Row]:
    """Makes rows of prompts; rejects those that leave no room in a model's context."""
    room = config.sampling.max_new_tokens
    limits = {"target": models.target.max_length - room - 1, "drafter": models.drafter.max_length - 1}

    def prepare(prompt: PromptReceived) -> Row:
        tokens, pieces = models.target_words.encode(prompt.text), models.drafter_words.encode(prompt.text)
        for model, length in (("target", len(tokens)), ("drafter", len(pieces))):
            if not 0 < length <= limits[model]:
                allowed = f"1 to {limits[model]} of the {model}'s tokens"
                raise UnfitPromptError(f"the prompt {prompt.prompt_id} must have {allowed}, got {length}")
        draws = SeededDraws(config.seed, prompt.offset)
        return Row(
            prompt.offset, prompt.prompt_id, prompt.dataset, prompt.text, tokens, len(tokens), pieces, draws, room
        )

    return prepare


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def build_loop(
    config: Config, models: Models, registry: Registry, run_folder: Path, notice: Callable[[str], None]
) -> Loop:
    """The whole loop over loaded models."""
    stages, cache, head = build_stages(config, models, notice)

    def write(folder: Path) -> None:
        models.drafter.save(folder, models.drafter_tokenizer)
        save_head(head, folder / HEAD_FILE)
        ngrams = ((entry.pieces, entry.token, entry.count) for entry in cache.entries())
        write_ngrams(folder / NGRAM_FILE, ngrams, models.pair.digest)

    def state() -> tuple[Versions, int]:
        distill = stages.distill
        return Versions(distill.drafter_version, distill.head_version, cache.version), len(cache)

    publisher: Publisher = NoPublisher()
    if config.publish.enabled:
        origin = Origin(config.publish.name, run_folder.name, config.target, config.drafter, models.pair.digest)
        publisher = FolderPublisher(run_folder, write, state, origin, registry, config.publish.interval, _now)
    first_only = config.drift.signal == "first" or (
        config.drift.signal == "auto" and config.draft.adapt and config.learn.enabled
    )
    return Loop(
        stages,
        _prepare(config, models),
        Recorder(config.target, models.target_words.bytes_of, models.target_words.decode),
        DriftWatch(config.drift, Rates(first_only)),
        publisher,
        config.batch,
        perf_counter,
    )
