"""The n-gram cache of one target, as configured."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from pipeline.build_models import DrafterModels
from pipeline.config import Config
from stages.eviction import EVICTIONS
from stages.ngram_cache import Cache, Entry, NgramCache, NoCache, entry_bytes
from stages.seeding import ngrams_of_text, ngrams_of_vocabulary
from stages.trie import Trie
from store.errors import ConfigError, CorruptError, SourceError, VocabularyError
from store.ngram_file import read_ngrams

NGRAM_FILE = "ngrams.parquet"


def make_cache(config: Config, models: DrafterModels, trie: Trie, notice: Callable[[str], None]) -> Cache:
    """An n-gram cache over the direct maps of `trie`: first what was saved with the drafter, then the seeds.

    In `tli` mode, and with the policy `off`, one that keeps nothing.

    Raises:
        ConfigError: if the cache is to be seeded from a text that is not named.
        SourceError: if that text cannot be read.
        CorruptError: if the saved n-grams cannot be read, or are not those of their pair of vocabularies.
    """
    if config.draft.mode == "tli" or config.cache.policy == "off":
        return NoCache()
    budget = math.inf if config.cache.policy == "unbounded" else config.cache.budget_bytes
    if budget < (least := entry_bytes((0, 1))):
        notice(f"cache.budget_bytes must be at least {least} to keep one n-gram, got {budget}: none will be kept")
    cache = NgramCache(trie, budget, EVICTIONS[config.cache.policy]())
    cache.load(_saved(models, notice))
    cache.fill(_seeds(config, models))
    return cache


def _saved(models: DrafterModels, notice: Callable[[str], None]) -> list[Entry]:
    """The n-grams that lie beside the drafter; those of another pair of vocabularies are left out with a word."""
    path = models.drafter_folder / NGRAM_FILE if models.drafter_folder else None
    if path is None or not path.is_file():
        return []
    try:
        saved = read_ngrams(path, models.pair.digest)
    except VocabularyError as error:
        notice(f"the n-gram cache of the drafter is left out: {error}")
        return []
    return [_checked(path, models, *ngram) for ngram in saved]


def _checked(path: Path, models: DrafterModels, pieces: tuple[int, ...], token: int, count: int) -> Entry:
    known = models.pair.pieces[token] if 0 <= token < len(models.pair.pieces) else None
    if known != pieces or len(pieces) < 2 or count < 1:
        raise CorruptError(
            f"{path} must hold n-grams as its two vocabularies spell them, but says that the pieces {pieces} are "
            f"token {token}, seen {count} times; delete the file to start with an empty cache"
        )
    return Entry(known, token, count)  # the pair's own pieces, which take no memory of their own


def _seeds(config: Config, models: DrafterModels) -> Iterable[Entry]:
    if config.cache.seed == "vocabulary":
        return ngrams_of_vocabulary(models.pair.pieces)
    if config.cache.seed == "text":
        return ngrams_of_text(models.target_words.encode(_seed_text(config)), models.pair.pieces)
    return ()


def _seed_text(config: Config) -> str:
    path = config.cache.seed_text
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
