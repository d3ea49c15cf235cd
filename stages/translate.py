"""Translate: drafted pieces become target tokens along the active trie, longest match first (design, section 4)."""

from collections.abc import Iterable, Sequence

from stages.blocks import STOP, Draft, Proposal, ProposedToken, Test, Verdict
from stages.ngram_cache import Cache
from stages.snapshot import Json, SnapshotReader, SnapshotWriter
from stages.stage import WithoutRows
from stages.trie import Node, Trie


def _follow(node: Node, pieces: Sequence[int], start: int, tests: list[Test]) -> tuple[Node, int, bool]:
    """Go down from `node` while the next piece is a child. Appends the tests of the way.

    Returns:
        the node where the token stops, the index of the first piece behind it, and whether that piece was looked at
        (it decided for STOP and begins the next token under a law without the node's children).
    """
    while node.children:
        if start == len(pieces):
            tests.append(Test(node, STOP, None))
            return node, start, False
        child = node.children.get(pieces[start])
        if child is None:
            tests.append(Test(node, STOP, start))
            return node, start, True
        tests.append(Test(node, pieces[start], start))
        node, start = child, start + 1
    return node, start, False


def parse(trie: Trie, pieces: Sequence[int]) -> tuple[ProposedToken, ...]:
    """Cut pieces into target tokens. Ends at the first place that names none, with a token None for it."""
    proposed: list[ProposedToken] = []
    position, excluded = 0, None
    while position < len(pieces):
        start, piece = position, pieces[position]
        tests = [Test(trie.root, piece, position, excluded)]
        group = trie.root.children.get(piece)
        if group is None:
            return (*proposed, ProposedToken(None, start, start + 1, tuple(tests)))
        node, position, looked_ahead = _follow(group, pieces, start + 1, tests)
        proposed.append(ProposedToken(node.token, start, position, tuple(tests)))
        if node.token is None:
            break
        excluded = node if looked_ahead else None
    return tuple(proposed)


def _longest(trie: Trie, pieces: Sequence[int], start: int) -> tuple[int | None, int]:
    """The token of the longest span from `start` that is one, and where the span ends."""
    best: tuple[int | None, int] = (None, start + 1)
    node: Node | None = trie.root
    for stop in range(start, len(pieces)):
        node = node.children.get(pieces[stop]) if node else None
        if node is not None and node.token is not None:
            best = (node.token, stop + 1)
    return best


def parse_longest(trie: Trie, pieces: Sequence[int]) -> tuple[ProposedToken, ...]:
    """The paper's way (its eq. 1): merge the longest span that is an active token, else a single direct piece."""
    proposed: list[ProposedToken] = []
    position = 0
    while position < len(pieces):
        token, stop = _longest(trie, pieces, position)
        proposed.append(ProposedToken(token, position, stop, (Test(trie.root, pieces[position], position),)))
        if token is None:
            break
        position = stop
    return tuple(proposed)


def remember(cache: Cache, pieces: Sequence[tuple[int, ...] | None], emitted: Iterable[int]) -> None:
    """Put those of the emitted target tokens that take several pieces into the cache."""
    for token in emitted:
        spelt = pieces[token] if token < len(pieces) else None
        if spelt and len(spelt) > 1:
            cache.observe(spelt, token)


class Translate(WithoutRows):
    """Drafts to proposals; between blocks, keeps the cache of n-grams up to date.

    Args:
        trie: direct maps and active n-grams.
        cache: owns the n-grams.
        pieces: per target id its pieces, or None.
        longest: use the paper's longest-span merge instead of the walk that verification can follow exactly.
    """

    def __init__(
        self, trie: Trie, cache: Cache, pieces: Sequence[tuple[int, ...] | None], *, longest: bool = False
    ) -> None:
        self.cache = cache
        self._trie, self._pieces, self._parse = trie, pieces, parse_longest if longest else parse

    @property
    def cache_version(self) -> int:
        """Changes of the cache so far."""
        return self.cache.version

    def save(self, keep: SnapshotWriter) -> Json:
        """See `stages.snapshot`. A target that was swapped in may share its cache."""
        return keep.once(self.cache, self.cache.save)

    def restore(self, saved: Json, kept: SnapshotReader) -> None:
        """See `stages.snapshot`."""
        kept.once(saved, self.cache.restore)

    def __call__(self, batch: Sequence[Draft]) -> list[Proposal]:
        """Translate each draft."""
        return [Proposal(draft, self._parse(self._trie, draft.pieces)) for draft in batch]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """Remember the emitted tokens that take several pieces: accepted, residual and bonus alike."""
        for verdict in verdicts:
            remember(self.cache, self._pieces, verdict.emitted)
