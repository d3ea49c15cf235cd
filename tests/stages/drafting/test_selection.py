"""What of a draft is verified: the tokens of all rows that give the highest expected tokens per cost."""

from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

import pytest
import torch
from doubles import row_of
from hypothesis import given
from hypothesis import strategies as st

from stages.contract.blocks import Draft, Proposal
from stages.drafting.costs import Costs
from stages.drafting.selection import Selection
from stages.ngrams.trie import Trie
from stages.verification.parsing import parse

PIECES = 6
COSTS = Costs(target=((1, 10.0), (11, 20.0)), drafter=((1, 1.0),))  # a pass costs 9 + tokens


def make_trie() -> Trie:
    """Every piece is a token, and two of them are one, too."""
    trie = Trie(target_size=PIECES + 1, drafter_size=PIECES)
    trie.insert_all([((piece,), piece) for piece in range(PIECES)])
    trie.insert_all([((4, 5), PIECES)])
    return trie


TRIE = make_trie()


def propose(pieces: Sequence[int], estimates: Sequence[float], **changes: object) -> Proposal:
    survival = tuple(accumulate(estimates, mul))
    draft = Draft(
        row=row_of([0]),
        pieces=tuple(pieces),
        draft_probs_KD=torch.eye(PIECES)[list(pieces)],
        entropies=tuple(map(float, pieces)),
        features_KF=torch.tensor([list(pieces)]).T,
        survival=survival,
        **{"droppable": True, **changes},
    )
    return Proposal(draft, parse(TRIE, draft.pieces))


def select(*batch: Proposal, costs: Costs = COSTS, **options: object) -> list[Proposal]:
    return Selection(costs, TRIE, parse, **options).select(batch)


@pytest.mark.parametrize(
    ("estimates", "kept"),
    [
        ((0.9, 0.9, 0.9, 0.9), 4),
        ((0.9, 0.9, 0.02, 0.9), 2),
        ((0.02, 0.9, 0.9, 0.9), 0),
        ((0.9, 0.9, 0.9, 0.02), 3),
        ((0.9, 0.02, 0.02, 0.02), 1),
    ],
)
def test_hopeless_last_pieces_are_not_verified(estimates: tuple[float, ...], kept: int):
    whole = propose((0, 1, 2, 3), estimates)
    (selected,) = select(whole)
    assert selected.verifiable == whole.verifiable[:kept]
    for name in ("pieces", "draft_probs_KD", "entropies", "features_KF", "survival"):
        values, cut = getattr(whole.draft, name), getattr(selected.draft, name)
        assert torch.equal(cut, values[:kept]) if isinstance(values, torch.Tensor) else cut == values[:kept], name


def test_a_draft_that_must_be_verified_stays_as_it_is():
    fixed = propose((0, 1), (0.01, 0.01), droppable=False)
    assert select(fixed) == [fixed]
    assert [len(one.verifiable) for one in select(fixed, propose((0, 1), (0.01, 0.01)))] == [2, 0]


def test_a_token_of_two_pieces_is_dropped_as_a_whole():
    (selected,) = select(propose((0, 4, 5), (0.9, 0.9, 0.01)))
    assert selected.draft.pieces == (0,)
    assert [one.tests[-1].position for one in selected.tokens] == [0]


chains = st.lists(st.lists(st.floats(0.05, 0.99), max_size=3), min_size=1, max_size=3)


@given(chains, st.floats(0.0, 4.0))
def test_the_rows_keep_the_tokens_with_the_highest_rate(rows: list[list[float]], per_token: float):
    """Against all numbers of tokens of each row."""
    size = len(rows)
    costs = Costs(((size, 10.0), (size + 1, 10.0 + per_token)), ((1, 1.0),))
    batch = [propose(range(len(row)), row) for row in rows]

    def rate(lengths: Sequence[int]) -> float:
        emitted = size + sum(sum(one.draft.survival[:length]) for one, length in zip(batch, lengths, strict=True))
        return emitted / (costs.verification_cost(size + sum(lengths)) + max(map(len, rows)))

    found = [len(one.verifiable) for one in select(*batch, costs=costs)]
    best = max(map(rate, product(*(range(len(row) + 1) for row in rows))))
    assert rate(found) == pytest.approx(best)


def test_an_alternative_is_verified_only_next_to_the_token_that_it_could_replace():
    free = Costs(((1, 10.0), (60, 10.0)), ((1, 1.0),))
    offered = propose((0, 1), (0.5, 0.02), alternatives=(((2, 0.3),), ((3, 0.9),)))
    (selected,) = select(offered, costs=free, most=2)
    assert [(one.token, one.parent) for one in selected.draft.tree.candidates] == [(0, -1), (1, 0), (3, 0), (2, -1)]
    steep = Costs(((1, 10.0), (2, 11.5), (3, 13.0), (4, 30.0)), ((1, 1.0),))
    (selected,) = select(offered, costs=steep, most=2)
    assert [(one.token, one.parent) for one in selected.draft.tree.candidates] == [(0, -1), (2, -1)]
