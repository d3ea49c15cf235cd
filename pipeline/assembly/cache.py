"""The n-gram cache of one target, as configured."""

import logging

from pipeline.assembly.models import DrafterModels
from pipeline.config.sections import CacheSettings
from stages.ngrams.cache import ENTRY_BYTES, Entry, NgramCache
from stages.ngrams.trie import Trie
from stages.verification.rules import Mode
from store.errors import CorruptError, VocabularyError
from store.registry.ngram_file import read_ngrams

LOG = logging.getLogger("omnidraft.models")

NGRAM_FILE = "ngrams.parquet"


def make_cache(settings: CacheSettings, mode: Mode, models: DrafterModels, trie: Trie) -> NgramCache:
    """An n-gram cache over the direct maps of `trie`, with what was saved with the drafter.

    With the policy `off`, or in a mode without n-grams, one that keeps nothing.
    """
    if not mode.ngrams or settings.policy == "off":
        return NgramCache(trie, 0)
    if settings.policy != "unbounded" and settings.budget_bytes < ENTRY_BYTES:
        LOG.warning(
            "cache.budget_bytes must be at least %d to keep one n-gram, got %d: none will be kept",
            ENTRY_BYTES,
            settings.budget_bytes,
        )
    cache = NgramCache(trie, settings.budget_bytes, settings.policy)
    cache.fill(_read_saved_ngrams(models))
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
    entries = list[Entry]()
    for pieces, token, count in saved:
        known = models.pair.pieces[token] if 0 <= token < len(models.pair.pieces) else None
        if known != pieces or len(pieces) < 2 or count < 1:
            raise CorruptError(
                f"{path} must hold n-grams as its two vocabularies spell them, but has the pieces {pieces} as "
                f"token {token}, seen {count} times; delete the file to start with an empty cache"
            )
        entries.append(Entry(known, token, count))  # the pair's own pieces, which take no memory of their own
    return entries
