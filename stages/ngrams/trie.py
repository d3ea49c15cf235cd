"""The active trie: sequences of drafter pieces that are target tokens.

A node may be a complete target token, have children, or both. A node that has children only is a *gap*: stopping
there gives no token. At the root the next token begins.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from stages.vocabulary.spelling import Pieces

_NO_CHILDREN: "dict[int, Node]" = {}  # shared by all leaves; never written to


class Node:
    """A prefix of pieces."""

    __slots__ = ("_members", "children", "token")

    def __init__(self) -> None:
        self.token: int | None = None  # the target token spelt by exactly these pieces, or None
        self.children = _NO_CHILDREN  # the next piece to the longer prefix
        self._members: tuple[int, ...] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """All complete tokens at and below this node."""
        if self._members is not None:
            return self._members
        own = () if self.token is None else (self.token,)
        if not self.children:
            return own  # not cached: cheap at a leaf
        self._members = (*own, *(token for child in self.children.values() for token in child.members))
        return self._members

    def invalidate_members(self) -> None:
        """Drop the cached members after a change below this node."""
        self._members = None


class Trie:
    """A prefix tree over drafter pieces whose leaves and some inner nodes are target tokens.

    Here the pieces are 0 "snow", 1 "ball", 2 "ing", 3 "the" and the tokens 0 "snow", 1 "snowballing", 2 "ball", 3
    "the", 4 "snowball". The first three insertions are direct maps; the fourth is an n-gram of three pieces. Below
    piece 0 there are now two tokens, and (0, 1) is a gap, because "snowball" is not active.

    >>> trie = Trie(target_size=5, drafter_size=4)
    >>> trie.insert_all([((0,), 0), ((1,), 2), ((3,), 3)])
    >>> trie.insert((0, 1, 2), 1)
    >>> trie.node_at((0,)).members, trie.node_at((0, 1)).members
    ((0, 1), (1,))
    >>> trie.token_at((0, 1)) is None
    True
    >>> trie.group_of_token_V  # per token its first piece; 4, the number of pieces, is for a token that is not active
    tensor([0, 0, 1, 3, 4])
    >>> trie.remove((0, 1, 2))
    >>> trie.node_at((0, 1)) is None, trie.group_of_token_V.tolist()
    (True, [0, 4, 1, 3, 4])
    """

    def __init__(self, target_size: int, drafter_size: int, device: torch.device | str = "cpu") -> None:
        # the node of the empty prefix; its children are the groups of the first level
        self.root = Node()
        self.root.children = {}
        self.drafter_size = drafter_size
        self._group_of_token_V = torch.full((target_size,), drafter_size, dtype=torch.long, device=device)
        self._changed: dict[int, int] = {}  # token to its group: changes not yet in the tensor

    @property
    def group_of_token_V(self) -> Tensor:  # noqa: N802, the shape is part of the name
        """Per target token its first piece, or `drafter_size` if the token is not in the trie.

        All changes since the last read are written to the device at once when it is read. The trie must not change
        during a verification.
        """
        if self._changed:
            changed = list(self._changed), list(self._changed.values())
            tokens, groups = torch.tensor(changed, dtype=torch.long, device=self._group_of_token_V.device)
            self._group_of_token_V[tokens] = groups
            self._changed = {}
        return self._group_of_token_V

    def _path(self, pieces: Pieces) -> list[Node]:
        """Return the nodes from the root along the pieces, as far as they exist."""
        nodes = [self.root]
        for piece in pieces:
            child = nodes[-1].children.get(piece)
            if child is None:
                break
            nodes.append(child)
        return nodes

    def node_at(self, pieces: Pieces) -> Node | None:
        """Return the node of exactly these pieces, or None."""
        nodes = self._path(pieces)
        return nodes[-1] if len(nodes) == len(pieces) + 1 else None

    def token_at(self, pieces: Pieces) -> int | None:
        """Return the token of exactly these pieces, or None."""
        node = self.node_at(pieces)
        return node.token if node else None

    def ngrams(self) -> Iterator[tuple[Pieces, int]]:
        """Iterate over the tokens of several pieces, in an order whose insertion gives the same trie."""
        pending: list[tuple[Pieces, Node]] = [((), self.root)]
        while pending:
            pieces, node = pending.pop()
            # Most children of the root are tokens of one piece, which lead nowhere.
            inner = [(piece, child) for piece, child in node.children.items() if pieces or child.children]
            pending += reversed([((*pieces, piece), child) for piece, child in inner])
            if len(pieces) > 1 and node.token is not None:
                yield pieces, node.token

    def insert(self, pieces: Pieces, token: int) -> None:
        """Insert a token with one or more pieces, which must not be another token's."""
        nodes = self._path(pieces)
        for piece in pieces[len(nodes) - 1 :]:
            parent, child = nodes[-1], Node()
            if parent.children is _NO_CHILDREN:
                parent.children = {}
            parent.children[piece] = child
            nodes.append(child)
        node = nodes[-1]
        if node.token not in (None, token):
            raise ValueError(f"pieces {pieces} already lead to token {node.token}, not {token}")
        node.token = token
        for each in nodes:
            each.invalidate_members()
        self._changed[token] = pieces[0]

    def insert_all(self, entries: Iterable[tuple[Pieces, int]]) -> None:
        for pieces, token in entries:
            self.insert(pieces, token)

    def remove(self, pieces: Pieces) -> None:
        """Remove a complete token, and the prefixes of no other token."""
        nodes = self._path(pieces)
        node = nodes[-1]
        if len(nodes) <= len(pieces) or node.token is None:
            raise ValueError(f"pieces {pieces} lead to no token")
        self._changed[node.token] = self.drafter_size
        node.token = None
        for each in nodes:
            each.invalidate_members()
        for parent, piece, child in reversed(list(zip(nodes, pieces, nodes[1:], strict=False))):
            if child.token is None and not child.children:
                del parent.children[piece]
                if parent is not self.root:  # a new dictionary has no free slots
                    parent.children = dict(parent.children.items()) or _NO_CHILDREN


def build_direct_trie(
    pieces: Sequence[Pieces | None], target_size: int, drafter_size: int, device: torch.device | str = "cpu"
) -> Trie:
    """Make a trie of the target tokens that are one piece. The sizes are the widths of the models' output layers, or
    those of the tokenizers without models.
    """
    trie = Trie(target_size, drafter_size, device)
    trie.insert_all((cut, token) for token, cut in enumerate(pieces) if cut and len(cut) == 1)
    return trie
