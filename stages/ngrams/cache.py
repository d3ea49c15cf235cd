"""The n-gram cache: the active target tokens of several pieces, within a byte budget.

Paper: section on the n-gram cache and appendix D.5. The cache owns the trie's n-grams: an inserted n-gram can be
drafted, an evicted one cannot.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from stages.ngrams.trie import Trie
from stages.vocabulary.spelling import Pieces


@dataclass(frozen=True)
class Entry:
    """One active n-gram as it is saved: its pieces, its target token, and its count of touches."""

    pieces: Pieces
    token: int
    count: int


# Memory of an entry with its nodes in the trie: measured 520 to 670 with 1,000 to 6,000 tokens of Llama 3 and of Qwen
# in the pieces of Llama 2.
ENTRY_BYTES = 600
# By the name of the setting `cache.policy`: the rank of an entry by its count. The lowest ranks are evicted first.
RANKS: dict[str, Callable[[int], int]] = {"lru": lambda count: 0, "lfu": lambda count: count}


class NgramCache:
    """The active n-grams of one trie within a budget in bytes.

    Entries change only in `observe`, `fill` and `load_state_dict`. They are called between blocks, so that no draft in
    flight refers to an evicted n-gram. The policy is a name of `RANKS`; also "unbounded", without a budget, and "off",
    with one of 0.
    """

    def __init__(self, trie: Trie, budget_bytes: float, policy: str = "lfu") -> None:
        self._trie, self._rank = trie, RANKS.get(policy, RANKS["lfu"])
        self._most = {"unbounded": math.inf, "off": 0}.get(policy, budget_bytes // ENTRY_BYTES)  # entries
        self._counts: dict[Pieces, int] = {}  # of touches, per n-gram
        # per rank its n-grams, the one that was touched longest ago first
        self._ranks: dict[int, OrderedDict[Pieces, None]] = {}
        self.version = 0  # number of insertions and removals so far

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def bytes(self) -> int:
        """Memory of all entries."""
        return len(self) * ENTRY_BYTES

    def observe(self, pieces: Pieces, token: int, times: int = 1) -> None:
        """Insert or touch an emitted token of several pieces, and evict another one where the budget is reached."""
        if not self._most:
            return
        if pieces not in self._counts:
            if len(self) == self._most:
                self._remove(next(iter(self._ranks[min(self._ranks)])))
            self._insert(pieces, token)
        self._touch(pieces, times)

    def _insert(self, pieces: Pieces, token: int) -> None:
        self._trie.insert(pieces, token)
        self._counts[pieces] = 0
        self.version += 1

    def _touch(self, pieces: Pieces, times: int) -> None:
        """Add to the count of an entry, and make it the youngest of its rank."""
        self._leave(pieces)
        self._counts[pieces] += times
        self._ranks.setdefault(self._rank(self._counts[pieces]), OrderedDict())[pieces] = None

    def _leave(self, pieces: Pieces) -> None:
        rank = self._rank(self._counts[pieces])
        if rank in self._ranks:
            self._ranks[rank].pop(pieces, None)
            if not self._ranks[rank]:
                del self._ranks[rank]

    def _remove(self, pieces: Pieces) -> None:
        self._leave(pieces)
        del self._counts[pieces]
        self._trie.remove(pieces)
        self.version += 1

    def fill(self, entries: Iterable[Entry]) -> None:
        """Insert entries with their counts, the highest first, as many as fit. Present entries are unchanged."""
        added: list[Pieces] = []
        for entry in sorted(entries, key=attrgetter("count"), reverse=True):
            if len(self) >= self._most:
                break
            if self._trie.token_at(entry.pieces) is None:
                self._insert(entry.pieces, entry.token)
                self._touch(entry.pieces, entry.count)
                added.append(entry.pieces)
        for pieces in reversed(added):
            self._touch(pieces, 0)  # the most important becomes the youngest

    def entries(self) -> list[Entry]:
        """Return all entries, those with the highest counts first."""
        return sorted(self._list(), key=lambda entry: (-entry.count, entry.pieces))

    def _list(self) -> list[Entry]:
        """Return all entries in the trie's own order."""
        ngrams = [ngram for ngram in self._trie.ngrams() if ngram[0] in self._counts]
        return [Entry(pieces, token, self._counts[pieces]) for pieces, token in ngrams]

    def state_dict(self) -> Any:
        """Return the entries in the trie's own order, on which sums over a node's tokens depend, and their places in
        the order of eviction.
        """
        entries = self._list()
        places = {entry.pieces: place for place, entry in enumerate(entries)}
        return {
            "version": self.version,
            "entries": [(entry.pieces, entry.token, entry.count) for entry in entries],
            "order": [places[pieces] for of_rank in self._ranks.values() for pieces in of_rank],
        }

    def load_state_dict(self, state: Any) -> None:
        for pieces in list(self._counts):
            self._remove(pieces)
        entries = [(tuple(pieces), token, count) for pieces, token, count in state["entries"]]
        for pieces, token, _ in entries:
            self._insert(pieces, token)
        for place in state["order"]:
            pieces, _, count = entries[place]
            self._touch(pieces, count)
        self.version = state["version"]


def count_text_ngrams(tokens: Iterable[int], pieces: Sequence[Pieces | None]) -> list[Entry]:
    """Count the target tokens of several pieces in a text: the most frequent first, then by id."""
    counts = sorted(Counter(tokens).items(), key=lambda item: (-item[1], item[0]))
    spelt = ((pieces[token], token, count) for token, count in counts if token < len(pieces))
    return [Entry(found, token, count) for found, token, count in spelt if found and len(found) > 1]
