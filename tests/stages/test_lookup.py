"""Lookup: the index finds what a search of the whole text finds, copies what followed, and is chosen where it pays."""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from doubles import TableModel, row_of
from hypothesis import given
from hypothesis import strategies as st

from stages.blocks import Decision as Decided
from stages.blocks import Draft, Proposal, ProposedToken, Row, Verdict
from stages.costs import Costs
from stages.decode import Decode
from stages.distributions import Sampling
from stages.head import AcceptanceHead
from stages.lookup import EVERY_MODEL_TURN, DecodeOrLookup, LookupDraft, Payoff
from stages.stopping import FixedLength
from stages.suffix_index import LONGEST_MATCH, NGRAMS, Match, SuffixIndex, continuation
from store.events import Origin, Outcome

PIECES = 6
COSTS = Costs(((1, 1.0), (2, 1.06)), ((1, 0.24),))
texts = st.lists(st.integers(0, 2), max_size=60)


def searched(pieces: list[int], begin: int = 0) -> Match | None:
    """The longest suffix that also stands earlier, by looking everywhere; what follows must lie behind `begin`."""
    for length in reversed(NGRAMS):
        for place in reversed(range(max(begin, length), len(pieces))):
            if pieces[place - length : place] == pieces[len(pieces) - length :]:
                while length < min(place, LONGEST_MATCH) and pieces[place - length - 1] == pieces[-length - 1]:
                    length += 1
                return Match(place, length)
    return None


@given(texts, st.lists(st.integers(1, 5)))
def test_the_index_finds_what_a_search_of_the_whole_text_finds(text: list[int], steps: list[int]):
    index, read = SuffixIndex(), 0
    for step in [*steps, len(text)]:
        read = min(read + step, len(text))
        index.read(text[:read])
        assert index.find(text[:read]) == searched(text[:read])


@given(texts, st.integers(4, 12))
def test_what_is_remembered_is_bounded_and_reaches_as_far_as_promised(text: list[int], reach: int):
    index = SuffixIndex(reach)
    for read in range(1, len(text) + 1):
        index.read(text[:read])
        assert len(index) <= 2 * reach * len(NGRAMS)
        # Halves are dropped whole: what is known begins at the last but one multiple of the reach.
        begin = max(0, ((read - 1) // reach - 1) * reach)
        assert index.find(text[:read]) == searched(text[:read], begin)
        assert read - begin >= min(read, reach)


def test_the_index_does_not_grow_with_the_text_for_ever():
    index, sizes = SuffixIndex(reach=50), set()
    text: list[int] = []
    for piece in range(1000):  # no n-gram comes twice: the worst case
        text.append(piece)
        index.read(text)
        sizes.add(len(index))
    assert max(sizes) <= 2 * 50 * len(NGRAMS)
    assert index.find([*text, 998, 999][:1000]) is None


def test_a_match_is_measured_beyond_the_longest_ngram():
    text = [*range(100, 140), 7, *range(100, 140)]
    index = SuffixIndex()
    index.read(text)
    assert index.find(text) == Match(40, LONGEST_MATCH)


def test_a_copy_goes_round_where_the_text_ends():
    assert continuation([1, 2, 3, 2, 3], 3, 5) == (2, 3, 2, 3, 2)
    assert continuation([4, 4], 1, 3) == (4, 4, 4)
    assert continuation([1, 2, 3, 4], 1, 2) == (2, 3)


# The choice.


def payoff_of(drafting: float = 0.24, verifying: float = 0.06) -> Payoff:
    """Costs of a piece in target passes."""
    return Payoff(Costs(((1, 1.0), (2, 1.0 + verifying)), ((1, drafting),)))


def learned(payoff: Payoff, match: int, right: int, wrong: int, times: int = 60) -> Payoff:
    for _ in range(times):
        payoff.note_copy(match, [1] * (right + wrong), [1] * right + [2] * wrong)
    return payoff


def test_before_anything_is_known_the_model_drafts():
    assert [payoff_of().best(match, 10) for match in (2, 5, 40)] == [0, 0, 0]


def test_copies_that_held_are_made_and_as_long_as_pays():
    payoff = payoff_of()
    learned(payoff, 20, right=10, wrong=0)
    assert payoff.best(20, 10) == 10
    assert payoff.best(20, 4) == 4
    assert payoff.best(2, 10) == 0, "a short match has not been seen to hold"


def test_a_copy_ends_where_one_more_piece_costs_more_than_it_brings():
    lengths = []
    for cost in (0.02, 0.1, 0.3):
        payoff = payoff_of(drafting=10, verifying=cost)
        payoff.note_model(None, 4, 0)
        learned(payoff, 40, right=3, wrong=1)  # three of four hold
        lengths.append(payoff.best(40, 30))
    assert lengths == sorted(lengths, reverse=True)
    assert 1 <= lengths[-1] < lengths[0] < 30


def test_a_piece_behind_others_counts_as_a_longer_match():
    payoff = payoff_of()
    learned(payoff, 3, right=1, wrong=0)  # the first piece after three always holds
    learned(payoff, 4, right=0, wrong=1)  # the next never does
    payoff.note_model(None, 4, 0)
    assert payoff.best(3, 10) == 1


def test_the_model_drafts_where_it_does_better_at_such_matches():
    payoff = learned(learned(payoff_of(drafting=0.04), 20, right=10, wrong=0), 10, right=6, wrong=0)
    for _ in range(60):
        payoff.note_model(20, drafted=20, accepted=15)
        payoff.note_model(10, drafted=20, accepted=0)
    assert payoff.best(20, 4) == 0
    assert payoff.best(10, 4) == 4, "matches of another length are judged on their own"


def test_a_copy_that_ceases_to_hold_is_given_up_soon():
    payoff = learned(payoff_of(), 20, right=10, wrong=0)
    blocks = 0
    while payoff.best(20, 10):
        payoff.note_copy(20, [1], [2])
        blocks += 1
    assert blocks < 100


def test_after_many_lookups_the_model_has_a_turn():
    payoff = learned(payoff_of(), 20, right=10, wrong=0)
    for _ in range(EVERY_MODEL_TURN):
        assert payoff.best(20, 10) == 10
        payoff.note_lookup(20)
    assert payoff.best(20, 10) == 0
    payoff.note_model(20, drafted=3, accepted=0)
    assert payoff.best(20, 10) == 10


# The stage.


def table_model() -> TableModel:
    return TableModel(lambda history: torch.arange(PIECES).roll(history[-1]).double(), PIECES)


def new_stage(payoff: Payoff | None = None, allowed: Sequence[int] = range(PIECES), most: int = 6) -> DecodeOrLookup:
    model = table_model()
    head = AcceptanceHead(model.hidden_size, 0)
    decode = Decode(model, head, FixedLength(), Sampling(1.0), allowed, 3, None)
    return DecodeOrLookup(decode, payoff or sure(), allowed, PIECES, most)


def sure() -> Payoff:
    """Copies that always held, at matches of any length."""
    payoff = payoff_of()
    for match in range(2, 40):
        learned(payoff, match, right=1, wrong=0)
    return payoff


def admitted(stage: DecodeOrLookup, *rows: Row) -> list[Row]:
    for row in rows:
        stage.admit(row)
    return list(rows)


def test_a_copy_is_certain_and_drawn_without_a_number():
    stage = new_stage()
    (row,) = admitted(stage, row_of([1, 2, 3, 4, 1, 2]))
    before = row_of([0]).draws.uniform(torch.ones(1))
    (draft,) = stage([row])
    assert isinstance(draft, LookupDraft)
    assert draft.pieces == (3, 4, 1, 2, 3, 4)
    assert torch.equal(draft.laws_KD, torch.eye(PIECES)[list(draft.pieces)])
    assert (draft.entropies, draft.features_KF, draft.survival) == ((0.0,) * 6, None, ())
    assert row.draws.uniform(torch.ones(1)) == before


def test_a_copy_is_no_longer_than_the_room_and_ends_before_what_may_not_be_drafted():
    stage = new_stage(allowed=[0, 1, 2, 3, 5])
    rows = admitted(
        stage,
        row_of([1, 2, 3, 5, 1, 2], offset=0, room=2),
        row_of([1, 2, 3, 4, 1, 2], offset=1),
        row_of([1, 2, 4, 3, 1, 2], offset=2),
    )
    pieces = [draft.pieces for draft in stage(rows)]
    assert pieces[:2] == [(3, 5), (3,)]
    assert len(pieces[2]) == 3, "nothing can be copied: the model drafts"
    assert 4 not in pieces[2]


def test_the_model_reads_all_that_it_missed_when_its_turn_comes():
    """Its laws are those of a model that was never made to rest, whatever it drafted before and beside whom."""
    stage, model = new_stage(most=4), table_model()
    row, other = admitted(stage, row_of([5, 1], offset=0), row_of([2, 2, 3, 2, 2], offset=1))
    kinds = []
    for emitted in ([3, 5, 1], *([3, 5, 1] for _ in range(30)), [0], [4], [2]):
        draft, _ = stage([row, other])
        kinds.append(type(draft))
        if type(draft) is Draft:
            history = [*row.pieces, *draft.pieces[:-1]]
            wanted = [model._logits(tuple(history[: len(row.pieces) + n])).softmax(0) for n in range(len(draft.pieces))]
            torch.testing.assert_close(draft.laws_KD, torch.stack(wanted).float())
        row.pieces += emitted
        other.pieces += [3, 2, 2]
    assert kinds[0] is Draft
    assert set(kinds[2:31]) == {LookupDraft}, "ninety pieces and more were not read in between"
    assert kinds[-1] is Draft


def verdict_of(draft: Draft, accepted: int) -> Verdict:
    """One token per piece; so many were accepted, the next was not."""
    tokens = tuple(ProposedToken(piece, n, n + 1, ()) for n, piece in enumerate(draft.pieces))
    decisions = tuple(
        Decided(n, token, Outcome.ACCEPTED, token.token, Origin.ACCEPTED) for n, token in enumerate(tokens[:accepted])
    )
    return Verdict(Proposal(draft, tokens), decisions, (), accepted, accepted)


class NotedPayoff(Payoff):
    def __init__(self) -> None:
        super().__init__(COSTS)
        self.noted: list[tuple] = []

    def note_copy(self, match: int, copied: Sequence[int], emitted: Sequence[int]) -> None:
        self.noted.append(("copy", match, tuple(copied[:3]), tuple(emitted)))

    def note_lookup(self, match: int) -> None:
        self.noted.append(("lookup", match))

    def note_model(self, match: int | None, drafted: int, accepted: int) -> None:
        self.noted.append(("model", match, drafted, accepted))


def test_what_was_emitted_judges_the_copy_that_was_not_drafted_too():
    payoff = NotedPayoff()  # knows nothing: the model drafts
    stage = new_stage(payoff)
    rows = admitted(stage, row_of([1, 2, 3, 4, 1, 2], offset=0), row_of([1, 2, 3, 4, 5], offset=1))
    drafts = stage(rows)
    for row in rows:
        row.pieces += [3, 0]
    stage.observe([verdict_of(draft, accepted=2) for draft in drafts])
    assert payoff.noted == [("copy", 2, (3, 4, 1), (3, 0)), ("model", 2, 3, 2), ("model", None, 3, 2)]


def test_a_copy_that_was_drafted_is_judged_as_a_lookup():
    payoff = NotedPayoff()
    payoff.best = lambda match, most: most
    stage = new_stage(payoff)
    (row,) = admitted(stage, row_of([1, 2, 3, 4, 1, 2]))
    (draft,) = stage([row])
    row.pieces += [3, 5]
    stage.observe([verdict_of(draft, accepted=1)])
    assert payoff.noted == [("copy", 2, (3, 4, 1), (3, 5)), ("lookup", 2)]


def test_the_models_drafting_is_told_of_its_own_drafts_alone():
    stage, told = new_stage(), []
    stage._decode.observe = told.append
    rows = admitted(stage, row_of([1, 2, 3, 4, 1, 2], offset=0), row_of([1, 2, 3, 4, 5], offset=1))
    copied, drafted = (verdict_of(draft, accepted=1) for draft in stage(rows))
    assert isinstance(copied.proposal.draft, LookupDraft)
    stage.observe([copied, drafted])
    stage.observe([copied])
    assert told == [[drafted]]


def test_nothing_of_a_row_is_kept_after_a_block_and_its_release():
    stage = new_stage()
    row, _ = admitted(stage, row_of([1, 2, 1, 2]), row_of([3]))
    gone = weakref.ref(row)
    stage.release(row)
    del row, _
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 3]])
def test_short_texts_have_no_match(text: list[int]):
    index = SuffixIndex()
    index.read(text)
    assert index.find(text) is None
