"""The active trie: drafter pieces that now lead to target tokens.

A node may be a complete target token, have children, or both. A node that has children only is a *gap*: stopping
there names no token. The root stands for "the next token begins here".
"""

from collections.abc import Iterable, Iterator, Sequence
from sys import getsizeof

import torch
from torch import Tensor

from stages.eviction import Pieces, Record, int_bytes

_EMPTY_BYTES = getsizeof(())
_POINTER = getsizeof((None,)) - _EMPTY_BYTES


class Groups:
    """The root's children, one place per piece of the drafter: groups come and go without a change of memory.

    Attributes:
        get: the group of a piece below the drafter's size, or None. The list's own lookup, as it is on the path of
            every drafted token.
    """

    __slots__ = ("_count", "_nodes", "get")

    def __init__(self, size: int) -> None:
        self._nodes: list[Node | None] = [None] * size
        self._count = 0
        self.get = self._nodes.__getitem__

    def __setitem__(self, piece: int, node: "Node") -> None:
        self._count += self._nodes[piece] is None
        self._nodes[piece] = node

    def __delitem__(self, piece: int) -> None:
        self._count -= self._nodes[piece] is not None
        self._nodes[piece] = None

    def __iter__(self) -> Iterator[int]:
        return (piece for piece, _ in self.items())

    def __len__(self) -> int:
        return self._count

    def items(self) -> Iterator[tuple[int, "Node"]]:
        """Pieces and their groups, in order of the pieces."""
        return ((piece, node) for piece, node in enumerate(self._nodes) if node is not None)

    def values(self) -> Iterator["Node"]:
        """The groups."""
        return (node for _, node in self.items())


_NO_CHILDREN: "dict[int, Node]" = {}  # shared by all leaves; never written to


class Node:
    """A prefix of pieces.

    Attributes:
        token: the target token spelt by exactly these pieces, or None.
        children: the next piece to the longer prefix.
        record: what the cache's order of leaving keeps about the token; None for direct maps and mere prefixes.
    """

    __slots__ = ("_members", "children", "record", "token")

    def __init__(self, children: "dict[int, Node] | Groups" = _NO_CHILDREN) -> None:
        self.token: int | None = None
        self.children = children
        self.record: Record | None = None
        self._members: tuple[int, ...] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """All complete tokens at and below this node."""
        if self._members is not None:
            return self._members
        own = () if self.token is None else (self.token,)
        if not self.children:
            return own  # not kept: a leaf makes it at once
        self._members = (*own, *(token for child in self.children.values() for token in child.members))
        return self._members

    def forget_members(self) -> None:
        """To be called when something below has changed."""
        self._members = None


_NODE_BYTES = getsizeof(Node())


class Trie:
    """A prefix tree over drafter pieces whose leaves and some inner nodes are target tokens.

    Attributes:
        root: the node of the empty prefix; its children are the groups of the first level.
        version: number of changes so far.
        bytes: memory that the insertions still present have taken, by the sizes of the objects made for them: nodes,
            tables of children, tokens, and the members of every inner node as if all had been read. Not counted: the
            root's table and `group_of_token_V`, whose sizes never change, and the pieces, which are the pair's.
    """

    def __init__(self, target_size: int, drafter_size: int, device: torch.device | str = "cpu") -> None:
        self.root = Node(Groups(drafter_size))
        self.drafter_size = drafter_size
        self.version = 0
        self.bytes = 0
        self._group_of_token_V = torch.full((target_size,), drafter_size, dtype=torch.long, device=device)
        self._changed: dict[int, int] = {}  # token to its group: what the tensor does not say yet

    @property
    def group_of_token_V(self) -> Tensor:  # noqa: N802, the shape is part of the name
        """Per target token its first piece, or `drafter_size` if the token is not in the trie.

        Up to date when read, by one write to the device for all changes since it was read last; a verification in
        progress must not outlive a change.
        """
        if self._changed:
            self._assign(list(self._changed), list(self._changed.values()))
            self._changed = {}
        return self._group_of_token_V

    def _assign(self, tokens: list[int], groups: list[int]) -> None:
        device = self._group_of_token_V.device
        index = torch.tensor(tokens, dtype=torch.long, device=device)
        self._group_of_token_V[index] = torch.tensor(groups, dtype=torch.long, device=device)

    def _path(self, pieces: Pieces) -> list[Node]:
        """The nodes from the root on, as far as they exist."""
        nodes = [self.root]
        for piece in pieces:
            child = nodes[-1].children.get(piece)
            if child is None:
                break
            nodes.append(child)
        return nodes

    def node_at(self, pieces: Pieces) -> Node | None:
        """The node of exactly these pieces, or None."""
        nodes = self._path(pieces)
        return nodes[-1] if len(nodes) == len(pieces) + 1 else None

    def token_at(self, pieces: Pieces) -> int | None:
        """The token that exactly these pieces lead to, or None."""
        node = self.node_at(pieces)
        return node.token if node else None

    def records(self) -> Iterator[tuple[Record, int]]:
        """Every record with its token, in such an order that inserting them again gives the same trie."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            pending += reversed([*node.children.values()])
            if node.record is not None and node.token is not None:
                yield node.record, node.token

    def insert(self, pieces: Pieces, token: int) -> Node:
        """Make `token` reachable by `pieces` (one or more), which must not already lead to another token.

        Returns:
            the node of the whole pieces.
        """
        nodes = self._path(pieces)
        for piece in pieces[len(nodes) - 1 :]:
            nodes.append(self._grow(nodes[-1], piece))
        node = nodes[-1]
        if node.token not in (None, token):
            raise ValueError(f"pieces {pieces} already lead to token {node.token}, not {token}")
        if node.token is None:
            node.token = token
            self.bytes += self._token_bytes(node, pieces)
        for each in nodes:
            each.forget_members()
        self._changed[token] = pieces[0]
        self.version += 1
        return node

    def insert_all(self, entries: Iterable[tuple[Pieces, int]]) -> None:
        """Insert many entries."""
        for pieces, token in entries:
            self.insert(pieces, token)

    def _grow(self, parent: Node, piece: int) -> Node:
        before, child = self._inner_bytes(parent), Node()
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[piece] = child
        self.bytes += self._inner_bytes(parent) - before + _NODE_BYTES
        return child

    @staticmethod
    def _inner_bytes(node: Node) -> int:
        """Memory of a node's table of children and of its own part of `members`, which a leaf does not keep."""
        if node.children is _NO_CHILDREN:
            return 0
        return getsizeof(node.children) + _EMPTY_BYTES + (node.token is not None) * _POINTER

    @staticmethod
    def _token_bytes(node: Node, pieces: Pieces) -> int:
        """Memory of a token and of its places in the members of all inner nodes on its way."""
        assert node.token is not None
        inner = len(pieces) - 1 + bool(node.children)
        return int_bytes(node.token) + inner * _POINTER

    def remove(self, pieces: Pieces) -> None:
        """Take a complete token out, and the prefixes that only it needed."""
        nodes = self._path(pieces)
        node = nodes[-1]
        if len(nodes) <= len(pieces) or node.token is None:
            raise ValueError(f"pieces {pieces} lead to no token")
        self.bytes -= self._token_bytes(node, pieces)
        self._changed[node.token] = self.drafter_size
        node.token = node.record = None
        for each in nodes:
            each.forget_members()
        for parent, piece, child in reversed(list(zip(nodes, pieces, nodes[1:], strict=False))):
            if child.token is None and not child.children:
                self._prune(parent, piece)
        self.version += 1

    def _prune(self, parent: Node, piece: int) -> None:
        before = self._inner_bytes(parent)
        del parent.children[piece]
        if isinstance(parent.children, dict):  # a new one has no room for what has left
            parent.children = dict(parent.children.items()) or _NO_CHILDREN
        self.bytes += self._inner_bytes(parent) - before - _NODE_BYTES


def trie_of_direct_maps(
    pieces: Sequence[Pieces | None], target_size: int, drafter_size: int, device: torch.device | str = "cpu"
) -> Trie:
    """A trie of the target tokens that are one piece.

    Args:
        pieces: per target id its pieces, or None (`Pair.pieces`).
        target_size, drafter_size: of the models' output layers, or of the tokenizers where there are no models.
        device: of the target's laws.
    """
    trie = Trie(target_size, drafter_size, device)
    trie.insert_all((cut, token) for token, cut in enumerate(pieces) if cut and len(cut) == 1)
    return trie
