"""Trees of target tokens as nested mappings: `{1: {3: {}}, 2: {}}` has 1, then 3 after it, or 2."""

from collections.abc import Callable, Mapping, Sequence

import torch

from stages.contract.blocks import Candidate, Draft, Proposal, SequenceState, TokenTree
from stages.contract.stage import Stage
from stages.decode import Decode
from store.events import DraftSource

Branches = Mapping[int, "Branches"]
TreeOfRow = Callable[[SequenceState], TokenTree | None]


def make_tree(branches: Branches, source: DraftSource = DraftSource.MEMORY) -> TokenTree:
    """The tree of these branches. Candidates of one place are in the order of the mapping."""
    candidates: list[Candidate] = []

    def add(nodes: Branches, parent: int, depth: int) -> None:
        for rank, (token, below) in enumerate(nodes.items()):
            place = len(candidates)
            candidates.append(Candidate(token, parent, depth, 0.5 ** (rank + 1), source, 3, 1))
            add(below, place, depth + 1)

    add(branches, -1, 0)
    return TokenTree(tuple(candidates))


def tree_draft(row: SequenceState, tree: TokenTree | None, drafter_size: int, dtype: torch.dtype) -> Draft:
    """The draft of a tree; without one it is empty."""
    nothing_KD = torch.zeros(0, drafter_size, dtype=dtype)
    source = tree.candidates[0].source if tree else DraftSource.MODEL
    return Draft(row, (), nothing_KD, (), None, (), source, tree)


def tree_proposals(rows: Sequence[SequenceState], trees: Sequence[TokenTree | None], size: int) -> list[Proposal]:
    """Proposals of trees, as `Translate` returns them."""
    drafts = [tree_draft(row, tree, size, torch.float64) for row, tree in zip(rows, trees, strict=True)]
    return [Proposal(draft, ()) for draft in drafts]


class GivenTrees(Stage[SequenceState, Draft]):
    """Drafts the tree that a function of the row gives, and by the model where it gives none.

    Args:
        decode: the model's drafting.
        tree_of: depends on the text of the row alone.
        model: whether the model drafts for a row.
    """

    def __init__(
        self, decode: Decode, tree_of: TreeOfRow, model: Callable[[SequenceState], bool] = lambda row: True
    ) -> None:
        self._decode, self._tree_of, self._model = decode, tree_of, model

    def admit(self, row: SequenceState) -> None:
        self._decode.admit(row)

    def release(self, row: SequenceState) -> None:
        self._decode.release(row)

    def __call__(self, batch: Sequence[SequenceState]) -> list[Draft]:
        trees = {row: tree for row in batch if (tree := self._tree_of(row))}
        skipped = [row for row in batch if row in trees or not self._model(row)]
        size, dtype = self._decode.model.vocabulary_size, self._decode.probs_dtype
        return [
            tree_draft(row, trees[row], size, dtype) if row in trees else draft
            for row, draft in zip(batch, self._decode(batch, skipped=skipped), strict=True)
        ]

    def observe(self, verdicts: Sequence[object]) -> None:
        """Nothing is learned."""
