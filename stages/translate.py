"""Translate: drafted pieces become target tokens."""

from collections.abc import Collection, Iterable, Sequence

from typing_extensions import override

from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.contract.snapshot import State
from stages.contract.stage import Stage
from stages.drafting.selection import Selection
from stages.ngrams.cache import NgramCache
from stages.ngrams.trie import Trie
from stages.verification.parsing import Parse, Spelling, parse


def cache_ngrams(cache: NgramCache, pieces: Spelling, emitted: Iterable[int]) -> None:
    """Insert the emitted target tokens of several pieces into the cache."""
    for token in emitted:
        spelt = pieces[token] if token < len(pieces) else None
        if spelt and len(spelt) > 1:
            cache.observe(spelt, token)


class Translate(Stage[Draft, Proposal]):
    """Drafts to proposals; between blocks, updates the cache of n-grams if it `keeps` any. `divide` divides pieces into
    tokens; by default `parse`, which verification can follow exactly.
    """

    selection: Selection | None = None  # chooses what of greedy drafts is verified; None: all of it

    def __init__(
        self, trie: Trie, cache: NgramCache, pieces: Spelling, divide: Parse = parse, *, keeps: bool = True
    ) -> None:
        self.cache, self._keeps = cache, keeps
        self._trie, self._pieces, self._parse = trie, pieces, divide

    @property
    def cache_version(self) -> int:
        """Number of changes of the cache."""
        return self.cache.version

    @override
    def state_dict(self, rows: Collection[SequenceState]) -> State:
        return {"cache": self.cache}  # several targets may share it

    @override
    def load_state_dict(self, state: State) -> None:
        self.cache.load_state_dict(state["cache"])

    @override
    def __call__(self, batch: Sequence[Draft]) -> list[Proposal]:
        proposals = [Proposal(draft, self._parse(self._trie, draft.pieces)) for draft in batch]
        return self.selection.select(proposals) if self.selection else proposals

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Insert the emitted tokens of several pieces into the cache: accepted, residual and bonus alike."""
        for verdict in verdicts if self._keeps else ():
            cache_ngrams(self.cache, self._pieces, verdict.emitted)
