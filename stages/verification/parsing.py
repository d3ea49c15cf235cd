"""Parsing: which target tokens drafted pieces are, by the longest match in the active trie."""

from collections.abc import Callable, Sequence

from stages.contract.blocks import STOP, ProposedToken, Test
from stages.ngrams.trie import Node, Trie

Spelling = Sequence[tuple[int, ...] | None]  # per target id its pieces, or None
Parse = Callable[[Trie, Sequence[int]], tuple[ProposedToken, ...]]


def _follow(node: Node, pieces: Sequence[int], start: int, tests: list[Test]) -> tuple[Node, int, bool]:
    """Descend from `node` while the next piece is a child. Appends the tests of the path. Returns the node where the
    token stops, the index of the first piece after it, and whether that piece was read: then it decided for STOP, and
    begins the next token under a distribution without the node's children.
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
    """Divide pieces into target tokens. Ends at the first place that is no token, with a `ProposedToken` of None.

    Here the pieces are 0 "snow", 1 "ball", 2 "ing", 3 "the"; the target tokens 0 "snow", 2 "ball" and 3 "the" are one
    piece each, and 1 "snowballing" is an n-gram of three pieces.

    >>> trie = Trie(target_size=4, drafter_size=4)
    >>> trie.insert_all([((0,), 0), ((1,), 2), ((3,), 3), ((0, 1, 2), 1)])
    >>> def show(*pieces):
    ...     return [(proposed.token, pieces[proposed.start : proposed.stop]) for proposed in parse(trie, pieces)]
    >>> show(3, 0, 1, 2)  # the longest match: "the", "snowballing"
    [(3, (3,)), (1, (0, 1, 2))]
    >>> show(0, 3)  # "snow" ends where the next piece is no child of its node
    [(0, (0,)), (3, (3,))]
    >>> show(0, 1, 3)  # a gap: no token is "snowball", and "the" after it is dropped
    [(None, (0, 1))]
    >>> show(3, 2)  # no token begins with "ing"
    [(3, (3,)), (None, (2,))]

    Each token has one test a level, (option, index of the piece that decided). In "snow the" piece 1, "the", decides
    that "snow" stops at its node, so its own test is on the distribution without the node's children.

    >>> snow, the = parse(trie, (0, 3))
    >>> [(test.option, test.position) for test in snow.tests]  # STOP is -1
    [(0, 0), (-1, 1)]
    >>> [(test.option, test.position, test.excluded is trie.node_at((0,))) for test in the.tests]
    [(3, 1, True)]
    >>> (snow,) = parse(trie, (0,))
    >>> snow.tests[-1].position is None  # the pieces ran out: the stop is certain
    True
    """
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
    """Return the token of the longest span from `start` that is an active token, and the end of the span."""
    best: tuple[int | None, int] = (None, start + 1)
    node: Node | None = trie.root
    for stop in range(start, len(pieces)):
        node = node.children.get(pieces[stop]) if node else None
        if node is not None and node.token is not None:
            best = (node.token, stop + 1)
    return best


def parse_longest(trie: Trie, pieces: Sequence[int]) -> tuple[ProposedToken, ...]:
    """Divide pieces as the paper does (its eq. 1): the longest span that is an active token, else one direct piece."""
    proposed: list[ProposedToken] = []
    position = 0
    while position < len(pieces):
        token, stop = _longest(trie, pieces, position)
        proposed.append(ProposedToken(token, position, stop, (Test(trie.root, pieces[position], position),)))
        if token is None:
            break
        position = stop
    return tuple(proposed)
