"""The n-gram cache as configured: policy, budget, and what was saved."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.studies.messages import collect_messages
from pipeline.assembly.cache import NGRAM_FILE, make_cache
from pipeline.config.settings import Config
from stages.ngrams.cache import Entry, NgramCache
from stages.ngrams.trie import Trie
from stages.verification.rules import MODES
from store.registry.ngram_file import write_ngrams

SPELLING = ((0,), (1,), (0, 1), (1, 1), (1, 0, 1), None, *((0, 1, n) for n in range(2, 90)))
PAIR = "ab" * 32
VOCABULARY = [Entry(pieces, token, 1) for token, pieces in enumerate(SPELLING) if pieces and len(pieces) > 1]


@dataclass
class Made:
    """A cache with its trie and the log of making it."""

    cache: NgramCache
    trie: Trie
    notes: list[str]

    @property
    def counts(self) -> dict[int, int]:
        """Counts of each entry, by token."""
        return {entry.token: entry.count for entry in self.cache.entries()}


Make = Callable[..., Made]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a cache; its drafter's folder is `tmp_path`. A text's tokens are its numbers."""

    def make(**settings: object) -> Made:
        config = Config().with_overrides({key.replace("__", "."): value for key, value in settings.items()})
        words = SimpleNamespace(encode=lambda text: [int(word) for word in text.split()])
        pair = SimpleNamespace(pieces=SPELLING, digest=PAIR)
        trie = Trie(len(SPELLING), 100)
        models = SimpleNamespace(pair=pair, target_vocabulary=words, drafter_folder=tmp_path)
        with collect_messages() as notes:
            return Made(make_cache(config.cache, MODES[config.draft.mode], models, trie), trie, notes)

    return make


@pytest.mark.parametrize("settings", [{"cache__policy": "off"}, {"draft__mode": "tli"}])
def test_off_keeps_nothing_whatever_was_saved(make: Make, tmp_path: Path, settings: dict[str, str]):
    write_ngrams(tmp_path / NGRAM_FILE, [((0, 1), 2, 1)], PAIR)
    made = make(**settings)
    made.cache.observe((0, 1), 2)
    assert (len(made.cache), made.cache.bytes, made.cache.entries()) == (0, 0, [])


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_budget_binds(make: Make, policy: str):
    made = make(cache__policy=policy, cache__budget_bytes=4_000)
    made.cache.fill(VOCABULARY)
    assert 3_000 < made.cache.bytes <= 4_000
    for token in range(6, len(SPELLING)):
        made.cache.observe(SPELLING[token], token)
        assert made.cache.bytes <= 4_000
    assert made.notes == []


def test_of_more_saved_entries_than_the_budget_holds_the_most_touched_are_kept(make: Make, tmp_path: Path):
    saved = [(SPELLING[token], token, 1 + (token * 37) % 83) for token in range(6, 89)]
    write_ngrams(tmp_path / NGRAM_FILE, saved, PAIR)
    kept = make(cache__budget_bytes=6_000).counts
    assert 5 < len(kept) < 80
    assert sorted(kept.values(), reverse=True) == sorted((count for *_, count in saved), reverse=True)[: len(kept)]


def test_the_cache_of_another_pair_is_left_out_with_a_word(make: Make, tmp_path: Path):
    write_ngrams(tmp_path / NGRAM_FILE, [((0, 1), 2, 1)], "cd" * 32)
    made = make()
    assert made.counts == {}
    assert len(made.notes) == 1
    assert "the n-gram cache of the drafter is left out" in made.notes[0]
    assert "cdcdcdcdcdcd" in made.notes[0]
