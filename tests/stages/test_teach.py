"""The pushed-down law against brute force over the vocabulary."""

import pytest
import torch
from doubles import row_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.blocks import Draft, Proposal, Teaching
from stages.teach import PieceIndex, PushDown, teach_nothing
from stages.vocabulary import Pair

PIECES = 4
EXTRA = 2  # outputs of the target beyond its tokenizer: at -inf, as `Verify` leaves them
spellings = st.lists(
    st.none() | st.lists(st.integers(0, PIECES - 1), min_size=1, max_size=4).map(tuple), min_size=2, max_size=12
).map(lambda found: tuple(None if pieces in found[:place] else pieces for place, pieces in enumerate(found)))
SPELLING = ((0,), (1,), (0, 1), (0, 1, 2), (0, 3), None, (2, 2))


def pair_of(spelling: tuple[tuple[int, ...] | None, ...]) -> Pair:
    return Pair(spelling, tuple(pieces or () for pieces in spelling), PIECES, "", 0)


def logits_of(spelling: tuple, count: int, seed: int = 0) -> Tensor:
    logits_NV = 2 * torch.randn(count, len(spelling) + EXTRA, generator=torch.Generator().manual_seed(seed))
    logits_NV[:, len(spelling) :] = -torch.inf
    return logits_NV


def taught(
    spelling: tuple, emitted: list[tuple[int, ...]], logits_NV: Tensor, kept: int = 99
) -> list[tuple[Teaching, ...]]:
    """Teaching for rows of 5, 6, ... pieces; each row has a law for every emitted token and one more."""
    starts = torch.tensor([0, *(len(tokens) + 1 for tokens in emitted)]).cumsum(0).tolist()
    rows = [row_of([0], [0] * (5 + number)) for number in range(len(emitted))]
    batch = [Proposal(Draft(row, (), torch.zeros(0, PIECES), (), None, ()), ()) for row in rows]
    return PushDown(pair_of(spelling), kept, torch.device("cpu"))(batch, emitted, logits_NV, starts)


def first_level(spelling: tuple, law: list[float]) -> dict[int, tuple[float, float]]:
    """Per piece: the probability of all tokens that begin with it, and of the one that it is."""
    found = {}
    for piece in range(PIECES):
        group = sum(p for pieces, p in zip(spelling, law, strict=False) if pieces and pieces[0] == piece)
        direct = sum(p for pieces, p in zip(spelling, law, strict=False) if pieces == (piece,))
        found[piece] = (group, direct)
    return found


def as_dict(teaching: Teaching) -> dict[int, tuple[float, float]]:
    assert len(set(teaching.ids)) == len(teaching.ids)
    return {i: (g, d) for i, g, d in zip(teaching.ids, teaching.group, teaching.direct, strict=True)}


@given(spellings, st.integers(0, 1000))
def test_the_first_level_is_the_law_of_the_first_piece(spelling, seed: int):
    logits_NV = logits_of(spelling, 2, seed)
    teaching = taught(spelling, [(0,)], logits_NV)[0][0]
    want = first_level(spelling, logits_NV[0].softmax(-1).tolist())
    got = as_dict(teaching)
    for piece, (group, direct) in want.items():
        assert got[piece] == (pytest.approx(group, abs=1e-6), pytest.approx(direct, abs=1e-6))
    assert sum(teaching.group) + teaching.rest == pytest.approx(1, abs=1e-6)
    unspelt = sum(p for pieces, p in zip(spelling, logits_NV[0].softmax(-1).tolist(), strict=False) if not pieces)
    assert teaching.rest == pytest.approx(unspelt, abs=1e-6)


@given(spellings, st.integers(0, 1000))
def test_deeper_levels_are_the_conditionals_along_the_token(spelling, seed: int):
    logits_NV = logits_of(spelling, 2, seed)
    law = logits_NV[0].softmax(-1).tolist()
    for token, pieces in enumerate(spelling):
        _, *deeper = taught(spelling, [(token,)], logits_NV)[0]
        assert [teaching.depth for teaching in deeper] == list(range(1, len(pieces or (0,))))
        for teaching in deeper:
            prefix = pieces[: teaching.depth]
            below = {
                other: p for other, p in zip(spelling, law, strict=False) if other and other[: len(prefix)] == prefix
            }
            for piece, (mass, direct) in as_dict(teaching).items():
                want = sum(p for other, p in below.items() if other[: len(prefix) + 1] == (*prefix, piece))
                assert (mass, direct) == (pytest.approx(want / sum(below.values()), abs=1e-6), 0)
            ends_here = below.get(prefix, 0.0) / sum(below.values())
            assert teaching.rest == pytest.approx(ends_here, abs=1e-6)
            assert pieces[teaching.depth] in teaching.ids


def test_only_the_likeliest_pieces_are_kept_and_the_rest_is_one_number():
    logits_NV = logits_of(SPELLING, 2)
    for kept in (1, 2, 3):
        for whole, short in zip(
            taught(SPELLING, [(3,)], logits_NV)[0], taught(SPELLING, [(3,)], logits_NV, kept)[0], strict=True
        ):
            likeliest = sorted(whole.group, reverse=True)[:kept]
            assert sorted(short.group, reverse=True) == pytest.approx(likeliest)
            assert sum(short.group) + short.rest == pytest.approx(1, abs=1e-6)
            assert as_dict(short).items() <= as_dict(whole).items()


def test_positions_are_those_of_the_pieces_that_the_row_will_have():
    found = taught(SPELLING, [(0, 2, 5, 3), (1, 6)], logits_of(SPELLING, 8))
    places = [[(teaching.position, teaching.depth) for teaching in row] for row in found]
    assert places[0] == [(5, 0), (6, 0), (7, 1), (8, 0), (8, 0), (9, 1), (10, 2)], "token 5 has no pieces"
    assert places[1] == [(6, 0), (7, 0), (8, 1)]


def test_every_row_is_taught_by_its_own_laws():
    logits_NV = logits_of(SPELLING, 5)
    together = taught(SPELLING, [(0, 1), (4,)], logits_NV)
    alone = taught(SPELLING, [(4,)], logits_NV[3:])
    assert [as_dict(teaching) for teaching in together[1]] == [as_dict(teaching) for teaching in alone[0]]


def test_a_law_that_says_nothing_below_a_prefix_is_taught_as_an_end():
    logits_NV = logits_of(SPELLING, 2)
    logits_NV[:, [2, 3]] = -torch.inf
    conditional = taught(SPELLING, [(3,)], logits_NV)[0][2]
    assert (conditional.group, conditional.rest) == ((0.0,), 1.0)


def test_the_temperature_of_the_sampling_plays_no_part_and_logits_of_half_precision_do():
    logits_NV = logits_of(SPELLING, 2)
    whole, half = (taught(SPELLING, [(2,)], logits)[0][0] for logits in (logits_NV, logits_NV.bfloat16()))
    assert whole.group == pytest.approx(half.group, abs=0.05)
    assert sum(half.group) + half.rest == pytest.approx(1, abs=1e-6)


def test_tokens_below_a_prefix_are_one_range():
    index = PieceIndex(pair_of(SPELLING))

    def tokens(prefix: tuple[int, ...]) -> set[int]:
        places = index.below(prefix)
        return set(index.tokens[places.start : places.stop])

    assert tokens((0,)) == {0, 2, 3, 4}
    assert tokens((0, 1)) == {2, 3}
    assert tokens((3,)) == set()


def test_who_does_not_learn_is_taught_nothing():
    assert teach_nothing([None, None], [(1,), (2,)], torch.zeros(2, 3), [0, 1, 2]) == [(), ()]
