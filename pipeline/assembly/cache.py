"""The n-gram cache of one target, as configured."""

import logging
import math
from collections.abc import Iterable
from pathlib import Path

from pipeline.assembly.models import DrafterModels
from pipeline.config.sections import CacheSettings
from stages.ngrams.cache import (
    Cache,
    Entry,
    NgramCache,
    NoCache,
    count_text_ngrams,
    entry_bytes,
    list_vocabulary_ngrams,
)
from stages.ngrams.eviction import EVICTIONS
from stages.ngrams.trie import Trie
from stages.rules import Mode
from store.errors import ConfigError, CorruptError, SourceError, VocabularyError
from store.registry.ngram_file import read_ngrams

LOG = logging.getLogger("omnidraft.models")

NGRAM_FILE = "ngrams.parquet"


def make_cache(settings: CacheSettings, mode: Mode, models: DrafterModels, trie: Trie) -> Cache:
    """An n-gram cache over the direct maps of `trie`: first what was saved with the drafter, then the seeds.

    With the policy `off`, or in a mode without n-grams, one that keeps nothing.

    Raises:
        ConfigError: if the cache is to be seeded from a text that is not named.
        SourceError: if that text cannot be read.
        CorruptError: if the saved n-grams cannot be read, or are not those of their pair of vocabularies.
    """
    if not mode.ngrams or settings.policy == "off":
        return NoCache()
    budget = math.inf if settings.policy == "unbounded" else settings.budget_bytes
    if budget < (least := entry_bytes((0, 1))):
        LOG.warning(
            "cache.budget_bytes must be at least %d to keep one n-gram, got %s: none will be kept", least, budget
        )
    cache = NgramCache(trie, budget, EVICTIONS[settings.policy]())
    cache.load(_read_saved_ngrams(models))
    cache.fill(_seeds(settings, models))
    return cache


def _read_saved_ngrams(models: DrafterModels) -> list[Entry]:
    """Read the n-grams saved with the drafter. Those of another pair of vocabularies are skipped with a warning."""
    path = models.drafter_folder / NGRAM_FILE if models.drafter_folder else None
    if path is None or not path.is_file():
        return []
    try:
        saved = read_ngrams(path, models.pair.digest)
    except VocabularyError as error:
        LOG.warning("the n-gram cache of the drafter is left out: %s", error)
        return []
    return [_check_ngram(path, models, *ngram) for ngram in saved]


def _check_ngram(path: Path, models: DrafterModels, pieces: tuple[int, ...], token: int, count: int) -> Entry:
    known = models.pair.pieces[token] if 0 <= token < len(models.pair.pieces) else None
    if known != pieces or len(pieces) < 2 or count < 1:
        raise CorruptError(
            f"{path} must hold n-grams as its two vocabularies spell them, but has the pieces {pieces} as "
            f"token {token}, seen {count} times; delete the file to start with an empty cache"
        )
    return Entry(known, token, count)  # the pair's own pieces, which take no memory of their own


def _seeds(settings: CacheSettings, models: DrafterModels) -> Iterable[Entry]:
    if settings.seed == "vocabulary":
        return list_vocabulary_ngrams(models.pair.pieces)
    if settings.seed == "text":
        return count_text_ngrams(models.target_vocabulary.encode(_seed_text(settings)), models.pair.pieces)
    return ()


def _seed_text(settings: CacheSettings) -> str:
    path = settings.seed_text
    if path is None:
        raise ConfigError(
            "cache.seed 'text' must come with a file of text in cache.seed_text, got none; name one, or set "
            "cache.seed to 'vocabulary' or 'none'"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"cache.seed_text must be a file of UTF-8 text, but '{path}' cannot be read: {error}; name another, or "
            "set cache.seed to 'vocabulary' or 'none'"
        ) from None
