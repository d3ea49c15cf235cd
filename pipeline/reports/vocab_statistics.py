"""Statistics of a pair of vocabularies, and of its coverage of a text."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stages.ngrams.cache import NgramCache
from stages.ngrams.trie import Trie
from stages.vocabulary.pair import Pair

BANDS = {"2": (2, 2), "3": (3, 3), "4": (4, 4), "5-8": (5, 8), "9+": (9, None)}


def band_of(length: int) -> str:
    """Return the band of a number of pieces, 2 or more."""
    return next(name for name, (_, last) in BANDS.items() if last is None or length <= last)


def ngrams_by_length(pair: Pair) -> dict[str, int]:
    """Count the n-grams of the vocabularies per band of pieces."""
    counts = Counter(band_of(len(pieces)) for pieces in pair.pieces if pieces and len(pieces) > 1)
    return {name: counts[name] for name in BANDS}


def silent(pair: Pair) -> int:
    """Count the target ids that can be spelt but are never proposed: unused, repeated or blocked ones."""
    return sum(1 for pieces in pair.pieces if not pieces) - pair.unspelt


@dataclass(frozen=True)
class Coverage:
    """Numbers of target tokens of a text, by the way in which the drafter can propose them."""

    tokens: int  # all tokens
    direct: int  # tokens of one piece
    ngrams: Mapping[str, int]  # tokens of several pieces, per band
    unspelt: int  # tokens without pieces


def coverage(pair: Pair, tokens: Iterable[int]) -> Coverage:
    """Count a text's target tokens. A token with the same bytes as another one counts with that one's pieces."""
    counts = Counter(len(pair.pieces[token] or pair.context[token]) for token in tokens)
    bands = Counter[str]()
    for length, count in counts.items():
        if length > 1:
            bands[band_of(length)] += count
    return Coverage(counts.total(), counts[1], {name: bands[name] for name in BANDS}, counts[0])


@dataclass(frozen=True)
class CacheCoverage:
    """Coverage of the second half of a text by a cache that was filled from the first half."""

    # entries, bytes: size of the cache after the first half
    entries: int
    bytes: int
    tokens: int  # of the second half
    direct: int  # of these, direct maps
    cached: int  # of these, n-grams in the cache
    missed: int  # of these, n-grams that were not


def cache_coverage(pair: Pair, trie: Trie, cache: NgramCache, tokens: Sequence[int]) -> CacheCoverage:
    """Fill an empty cache with the first half of a text, then look up the second half without changing it."""
    half = len(tokens) // 2
    for token in tokens[:half]:
        pieces = pair.pieces[token]
        if pieces and len(pieces) > 1:
            cache.observe(pieces, token)
    later = [pair.pieces[token] for token in tokens[half:]]
    ngrams = [pieces for pieces in later if pieces and len(pieces) > 1]
    cached = sum(trie.token_at(pieces) is not None for pieces in ngrams)
    direct = sum(1 for pieces in later if pieces and len(pieces) == 1)
    return CacheCoverage(len(cache), cache.bytes, len(later), direct, cached, len(ngrams) - cached)


def commonest_ngrams(pair: Pair, tokens: Iterable[int], most: int) -> list[tuple[int, int]]:
    """Return the most frequent n-grams of a text as (target id, count); of equals the smaller id first."""
    counts = Counter(token for token in tokens if len(pair.pieces[token] or ()) > 1)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
