"""The pushed-down distribution against brute force over the vocabulary."""

import pytest
import torch
from doubles import row_of
from hypothesis import given
from hypothesis import strategies as st
from soft_target_tables import SoftTarget, compute_all
from stored_states import store
from torch import Tensor

from stages.contract.blocks import Decision, Draft, Proposal, Verdict
from stages.learn.examples.builder import ExampleBuilder
from stages.learn.examples.teacher import TrieTeacher
from stages.vocabulary.pair import Pair
from store.events import Origin, Outcome

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


def accept(index: int, token: int) -> Decision:
    return Decision(index, None, Outcome.ACCEPTED, token, Origin.ACCEPTED)


def make_soft_targets(
    spelling: tuple, emitted: list[tuple[int, ...]], logits_NV: Tensor, kept: int = 99, temperature: float = 1.0
) -> list[tuple[SoftTarget, ...]]:
    """Soft targets for rows of 5, 6, ... pieces; each row has a distribution for every emitted token and one more."""
    starts = torch.tensor([0, *(len(tokens) + 1 for tokens in emitted)]).cumsum(0).tolist()
    rows = [row_of([0], [0] * (5 + number)) for number in range(len(emitted))]
    batch = [Proposal(Draft(row, (), torch.zeros(0, PIECES), (), None, ()), ()) for row in rows]
    outcomes = [tuple(accept(place, token) for place, token in enumerate(tokens)) for tokens in emitted]
    given = TrieTeacher(pair_of(spelling), kept, temperature=temperature)(batch, outcomes, logits_NV, starts)
    return [compute_all(one) for one in given]


def first_level(spelling: tuple, distribution: list[float]) -> dict[int, tuple[float, float]]:
    """Per piece: the probability of all tokens that begin with it, and of the one that it is."""
    found = {}
    for piece in range(PIECES):
        group = sum(p for pieces, p in zip(spelling, distribution, strict=False) if pieces and pieces[0] == piece)
        direct = sum(p for pieces, p in zip(spelling, distribution, strict=False) if pieces == (piece,))
        found[piece] = (group, direct)
    return found


def as_dict(soft_target: SoftTarget) -> dict[int, tuple[float, float]]:
    assert len(set(soft_target.ids)) == len(soft_target.ids)
    return {i: (g, d) for i, g, d in zip(soft_target.ids, soft_target.group, soft_target.direct, strict=True)}


@given(spellings, st.integers(0, 1000))
def test_the_first_level_is_the_distribution_of_the_first_piece(spelling, seed: int):
    logits_NV = logits_of(spelling, 2, seed)
    soft_target = make_soft_targets(spelling, [(0,)], logits_NV)[0][0]
    want = first_level(spelling, logits_NV[0].softmax(-1).tolist())
    got = as_dict(soft_target)
    for piece, (group, direct) in want.items():
        assert got.get(piece, (0, 0)) == (pytest.approx(group, abs=1e-6), pytest.approx(direct, abs=1e-6))
    assert sum(soft_target.group) + soft_target.rest == pytest.approx(1, abs=1e-6)
    unspelt = sum(p for pieces, p in zip(spelling, logits_NV[0].softmax(-1).tolist(), strict=False) if not pieces)
    assert soft_target.rest == pytest.approx(unspelt, abs=1e-6)


@given(spellings, st.integers(0, 1000))
def test_deeper_levels_are_the_conditionals_along_the_token(spelling, seed: int):
    logits_NV = logits_of(spelling, 2, seed)
    distribution = logits_NV[0].softmax(-1).tolist()
    for token, pieces in enumerate(spelling):
        _, *deeper = make_soft_targets(spelling, [(token,)], logits_NV)[0]
        assert [soft_target.depth for soft_target in deeper] == list(range(1, len(pieces or (0,))))
        for soft_target in deeper:
            prefix = pieces[: soft_target.depth]
            below = {
                other: p
                for other, p in zip(spelling, distribution, strict=False)
                if other and other[: len(prefix)] == prefix
            }
            for piece, (mass, direct) in as_dict(soft_target).items():
                want = sum(p for other, p in below.items() if other[: len(prefix) + 1] == (*prefix, piece))
                assert (mass, direct) == (pytest.approx(want / sum(below.values()), abs=1e-6), 0)
            ends_here = below.get(prefix, 0.0) / sum(below.values())
            assert soft_target.rest == pytest.approx(ends_here, abs=1e-6)
            assert pieces[soft_target.depth] in soft_target.ids


def test_tokens_that_are_not_stored_are_part_of_the_rest():
    logits_NV = logits_of(SPELLING, 2)
    distribution = logits_NV[0].softmax(-1)
    for kept in (1, 2, 3):
        found = make_soft_targets(SPELLING, [(3,)], logits_NV, kept)[0][0]
        stored = distribution.topk(kept).indices.tolist()
        want = first_level(SPELLING, [p if token in stored else 0 for token, p in enumerate(distribution.tolist())])
        assert as_dict(found) == {
            piece: (pytest.approx(g, abs=1e-6), pytest.approx(d, abs=1e-6)) for piece, (g, d) in want.items() if g
        }
        assert sum(found.group) + found.rest == pytest.approx(1, abs=1e-6)


def test_a_lower_temperature_is_that_of_larger_logits():
    logits_NV = logits_of(SPELLING, 2)
    for one, other in zip(
        make_soft_targets(SPELLING, [(3,)], logits_NV, temperature=0.5)[0],
        make_soft_targets(SPELLING, [(3,)], 2 * logits_NV)[0],
        strict=True,
    ):
        assert one.ids == other.ids
        assert (*one.group, *one.direct, one.rest) == pytest.approx((*other.group, *other.direct, other.rest), abs=1e-6)


def test_positions_are_those_of_the_pieces_that_the_row_will_have():
    found = make_soft_targets(SPELLING, [(0, 2, 5, 3), (1, 6)], logits_of(SPELLING, 8))
    places = [[(soft_target.position, soft_target.depth) for soft_target in row] for row in found]
    assert places[0] == [(5, 0), (6, 0), (7, 1), (8, 0), (8, 0), (9, 1), (10, 2)], "token 5 has no pieces"
    assert places[1] == [(6, 0), (7, 0), (8, 1)]


def test_what_is_stored_of_a_block_is_small_and_outlives_the_logits():
    """It holds arrays of its own: a view would keep the logits of the whole batch in memory."""
    logits_NV = logits_of(SPELLING, 2)
    batch = [Proposal(Draft(row_of([0]), (), torch.zeros(0, PIECES), (), None, ()), ())]
    (logits,) = TrieTeacher(pair_of(SPELLING), 3)(batch, [(accept(0, 3),)], logits_NV, [0])
    before = compute_all(logits)
    logits_NV.fill_(0)
    assert compute_all(logits) == before
    assert logits.spell(logits).probs.shape == (1, 3)


@pytest.mark.parametrize("saved", [False, True])
def test_blocks_are_spelt_together_as_each_alone(saved: bool):
    row, builder = row_of([0], [0] * 5), ExampleBuilder()
    teacher = TrieTeacher(pair_of(SPELLING), 4)
    proposal = Proposal(Draft(row, (), torch.zeros(0, PIECES), (), None, ()), ())
    alone = []
    for number, emitted in enumerate([(0, 2, 5), (3,), (1, 6)]):
        outcome = tuple(accept(place, token) for place, token in enumerate(emitted))
        (given,) = teacher([proposal], [outcome], logits_of(SPELLING, 3, seed=number), [0])
        builder.add_verdict(Verdict(proposal, outcome, emitted, 0, 0, given))
        alone += compute_all(given)
        if saved:
            state = store(builder.state_dict(row))
            builder = ExampleBuilder.from_state(state)
    assert list(compute_all(builder.build(row, "big").soft_targets)) == alone
