"""The active trie: drafter pieces that now lead to target tokens.

A node may be a complete target token, have children, or both. A node that has children only is a *gap*: stopping
there names no token. The root stands for "the next token begins here".
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Node:
    """A prefix of pieces.

    Attributes:
        token: the target token spelt by exactly these pieces, or None.
        children: the next piece to the longer prefix.
    """

    __slots__ = ("_members", "children", "token")

    def __init__(self) -> None:
        self.token: int | None = None
        self.children: dict[int, Node] = {}
        self._members: tuple[int, ...] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """All complete tokens at and below this node."""
        if self._members is None:
            below = [token for child in self.children.values() for token in child.members]
            self._members = (*(() if self.token is None else (self.token,)), *below)
        return self._members

    def forget_members(self) -> None:
        """To be called when something below has changed."""
        self._members = None


class Trie:
    """A prefix tree over drafter pieces whose leaves and some inner nodes are target tokens.

    Attributes:
        root: the node of the empty prefix; its children are the groups of the first level.
        group_of_token_V: per target token its first piece, or `drafter_size` if the token is not in the trie.
            Kept up to date by every change; a verification in progress must not outlive a change.
        version: number of changes so far.
    """

    def __init__(self, target_size: int, drafter_size: int, device: torch.device | str = "cpu") -> None:
        self.root = Node()
        self.drafter_size = drafter_size
        self.group_of_token_V: Tensor = torch.full((target_size,), drafter_size, dtype=torch.long, device=device)
        self.version = 0

    def _path(self, pieces: tuple[int, ...]) -> list[Node]:
        nodes = [self.root]
        for piece in pieces:
            nodes.append(nodes[-1].children.setdefault(piece, Node()))
        return nodes

    def token_at(self, pieces: tuple[int, ...]) -> int | None:
        """The token that exactly these pieces lead to, or None."""
        node: Node | None = self.root
        for piece in pieces:
            node = node.children.get(piece) if node else None
        return node.token if node else None

    def insert(self, pieces: tuple[int, ...], token: int) -> None:
        """Make `token` reachable by `pieces` (one or more). The pieces must not already lead to another token."""
        self.insert_all([(pieces, token)])

    def insert_all(self, entries: Iterable[tuple[tuple[int, ...], int]]) -> None:
        """Insert many entries with one write to the device."""
        tokens, groups = [], []
        for pieces, token in entries:
            nodes = self._path(pieces)
            if nodes[-1].token not in (None, token):
                raise ValueError(f"pieces {pieces} already lead to token {nodes[-1].token}, not {token}")
            nodes[-1].token = token
            for node in nodes:
                node.forget_members()
            tokens.append(token)
            groups.append(pieces[0])
        self._assign(tokens, groups)

    def remove(self, pieces: tuple[int, ...]) -> None:
        """Take a complete token out, and the prefixes that only it needed."""
        token = self.token_at(pieces)
        if token is None:
            raise ValueError(f"pieces {pieces} lead to no token")
        nodes = self._path(pieces)
        nodes[-1].token = None
        for parent, piece, node in reversed(list(zip(nodes, pieces, nodes[1:], strict=False))):
            parent.forget_members()
            node.forget_members()
            if node.token is None and not node.children:
                del parent.children[piece]
        self._assign([token], [self.drafter_size])

    def _assign(self, tokens: list[int], groups: list[int]) -> None:
        device = self.group_of_token_V.device
        index = torch.tensor(tokens, dtype=torch.long, device=device)
        self.group_of_token_V[index] = torch.tensor(groups, dtype=torch.long, device=device)
        self.version += 1
