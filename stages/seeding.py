"""What an n-gram cache may hold before the first prompt: n-grams of two vocabularies, or the commonest of a text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from stages.eviction import Pieces
from stages.ngram_cache import Entry


def ngrams_of_vocabulary(pieces: Sequence[Pieces | None]) -> Iterator[Entry]:
    """Every target token of several pieces, counted once: those of fewest pieces first, then by id.

    Args:
        pieces: per target id its pieces, or None.
    """
    long = [token for token, spelt in enumerate(pieces) if spelt and len(spelt) > 1]
    long.sort(key=lambda token: len(pieces[token] or ()))
    return (Entry(pieces[token] or (), token, 1) for token in long)


def ngrams_of_text(tokens: Iterable[int], pieces: Sequence[Pieces | None]) -> list[Entry]:
    """The target tokens of several pieces in a text, with how often they occur: the commonest first, then by id.

    Args:
        tokens: the text in the target's ids.
        pieces: per target id its pieces, or None.
    """
    counts = sorted(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))
    spelt = ((pieces[token], token, count) for token, count in counts if token < len(pieces))
    return [Entry(found, token, count) for found, token, count in spelt if found and len(found) > 1]
