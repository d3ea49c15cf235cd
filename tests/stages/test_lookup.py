"""Lookup: the index finds what a search of the whole text finds, copies what followed, and is chosen where it pays."""

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from doubles import TableModel, row_of
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.sections import DraftSettings
from stages.contract.blocks import Decision as Decided
from stages.contract.blocks import Draft, Proposal, ProposedToken, SequenceState, Verdict
from stages.contract.snapshot import Saved, SnapshotReader, SnapshotWriter
from stages.decode import Decode
from stages.drafting.costs import Costs
from stages.drafting.head import AcceptanceHead
from stages.drafting.prompt_lookup import LONGEST_MATCH, NGRAMS, Match, PromptLookup, SuffixIndex, continue_from
from stages.drafting.sources import EVERY_MODEL_TURN, Copy, CopySource, DraftSourceSelector, Offer
from stages.drafting.stopping import FixedLength
from stages.lookup import SOURCES, DecodeOrLookup, make_sources
from stages.sampling.distributions import Sampling
from store.events import DraftSource, Origin, Outcome

PIECES = 6
COSTS = Costs(((1, 1.0), (2, 1.06)), ((1, 0.24),))
texts = st.lists(st.integers(0, 2), max_size=60)


def search(pieces: list[int], begin: int = 0) -> Match | None:
    """The longest suffix that also occurs earlier, by looking everywhere; what follows must lie after `begin`."""
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
        assert index.find(text[:read]) == search(text[:read])


@given(texts, st.integers(4, 12))
def test_what_is_remembered_is_bounded_and_reaches_as_far_as_promised(text: list[int], reach: int):
    index = SuffixIndex(reach)
    for read in range(1, len(text) + 1):
        index.read(text[:read])
        assert len(index) <= 2 * reach * len(NGRAMS)
        # Halves are dropped whole: what is known begins at the last but one multiple of the reach.
        begin = max(0, ((read - 1) // reach - 1) * reach)
        assert index.find(text[:read]) == search(text[:read], begin)
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
    assert continue_from([1, 2, 3, 2, 3], 3, 5) == (2, 3, 2, 3, 2)
    assert continue_from([4, 4], 1, 3) == (4, 4, 4)
    assert continue_from([1, 2, 3, 4], 1, 2) == (2, 3)


# The choice.


def make_selector(drafting: float = 0.24, verifying: float = 0.06) -> DraftSourceSelector:
    """Costs of a piece in target passes."""
    return DraftSourceSelector(Costs(((1, 1.0), (2, 1.0 + verifying)), ((1, drafting),)))


def teach_selector(
    selector: DraftSourceSelector, match: int, right: int, wrong: int, times: int = 60
) -> DraftSourceSelector:
    for _ in range(times):
        selector.observe_copy(match, [1] * (right + wrong), [1] * right + [2] * wrong)
    return selector


def test_before_anything_is_known_the_model_drafts():
    assert [make_selector().choose_length(match, 10).length for match in (2, 5, 40)] == [0, 0, 0]


def test_copies_that_held_are_made_and_as_long_as_pays():
    selector = make_selector()
    teach_selector(selector, 20, right=10, wrong=0)
    assert selector.choose_length(20, 10).length == 10
    assert selector.choose_length(20, 4).length == 4
    assert selector.choose_length(2, 10).length == 0, "a short match has not been seen to hold"


def test_a_copy_ends_where_one_more_piece_costs_more_than_it_brings():
    lengths = []
    for cost in (0.02, 0.1, 0.3):
        selector = make_selector(drafting=10, verifying=cost)
        selector.observe_model(None, 4, 0)
        teach_selector(selector, 40, right=3, wrong=1)  # three of four hold
        lengths.append(selector.choose_length(40, 30).length)
    assert lengths == sorted(lengths, reverse=True)
    assert 1 <= lengths[-1] < lengths[0] < 30


def test_a_piece_after_others_counts_as_a_longer_match():
    selector = make_selector()
    teach_selector(selector, 3, right=1, wrong=0)  # the first piece after three always holds
    teach_selector(selector, 4, right=0, wrong=1)  # the next never does
    selector.observe_model(None, 4, 0)
    assert selector.choose_length(3, 10).length == 1


def test_the_model_drafts_where_it_does_better_at_such_matches():
    selector = teach_selector(teach_selector(make_selector(drafting=0.04), 20, right=10, wrong=0), 10, right=6, wrong=0)
    for _ in range(60):
        selector.observe_model(20, drafted=20, accepted=15)
        selector.observe_model(10, drafted=20, accepted=0)
    assert selector.choose_length(20, 4).length == 0
    assert selector.choose_length(10, 4).length == 4, "matches of another length are judged on their own"


def test_a_copy_that_ceases_to_hold_is_given_up_soon():
    selector = teach_selector(make_selector(), 20, right=10, wrong=0)
    blocks = 0
    while selector.choose_length(20, 10).length:
        selector.observe_copy(20, [1], [2])
        blocks += 1
    assert blocks < 100


def test_after_many_lookups_the_model_has_a_turn():
    selector = teach_selector(make_selector(), 20, right=10, wrong=0)
    for _ in range(EVERY_MODEL_TURN):
        assert selector.choose_length(20, 10).length == 10
        selector.count_copy(20)
    assert selector.choose_length(20, 10).length == 0
    selector.observe_model(20, drafted=3, accepted=0)
    assert selector.choose_length(20, 10).length == 10


# The stage.


def table_model() -> TableModel:
    return TableModel(lambda history: torch.arange(PIECES).roll(history[-1]).double(), PIECES)


def new_stage(
    selector: DraftSourceSelector | None = None, allowed: Sequence[int] = range(PIECES), most: int = 6
) -> DecodeOrLookup:
    model = table_model()
    head = AcceptanceHead(model.hidden_size, 0)
    decode = Decode(model, head, FixedLength(), Sampling(1.0), allowed, 3, None)
    return DecodeOrLookup(decode, [PromptLookup(selector or sure(), allowed, most)])


def sure() -> DraftSourceSelector:
    """Copies that always held, at matches of any length."""
    selector = make_selector()
    for match in range(2, 40):
        teach_selector(selector, match, right=1, wrong=0)
    return selector


def admit(stage: DecodeOrLookup, *rows: SequenceState) -> list[SequenceState]:
    for row in rows:
        stage.admit(row)
    return list(rows)


def test_a_copy_is_certain_and_drawn_without_a_number():
    stage = new_stage()
    (row,) = admit(stage, row_of([1, 2, 3, 4, 1, 2]))
    before = row_of([0]).rng.uniform(torch.ones(1))
    (draft,) = stage([row])
    assert draft.source is DraftSource.LOOKUP
    assert draft.pieces == (3, 4, 1, 2, 3, 4)
    assert torch.equal(draft.draft_probs_KD, torch.eye(PIECES)[list(draft.pieces)])
    assert (draft.entropies, draft.features_KF, draft.survival) == ((0.0,) * 6, None, ())
    assert row.rng.uniform(torch.ones(1)) == before


def test_a_copy_is_no_longer_than_the_remaining_tokens_and_ends_before_what_may_not_be_drafted():
    stage = new_stage(allowed=[0, 1, 2, 3, 5])
    rows = admit(
        stage,
        row_of([1, 2, 3, 5, 1, 2], offset=0, remaining_tokens=2),
        row_of([1, 2, 3, 4, 1, 2], offset=1),
        row_of([1, 2, 4, 3, 1, 2], offset=2),
    )
    pieces = [draft.pieces for draft in stage(rows)]
    assert pieces[:2] == [(3, 5), (3,)]
    assert len(pieces[2]) == 3, "nothing can be copied: the model drafts"
    assert 4 not in pieces[2]


def test_the_model_reads_all_that_it_missed_when_its_turn_comes():
    """Its distributions are those of a model that always drafted, whatever else is in the batch."""
    stage, model = new_stage(most=4), table_model()
    row, other = admit(stage, row_of([5, 1], offset=0), row_of([2, 2, 3, 2, 2], offset=1))
    kinds = []
    for emitted in ([3, 5, 1], *([3, 5, 1] for _ in range(30)), [0], [4], [2]):
        draft, _ = stage([row, other])
        kinds.append(draft.source)
        if draft.source is DraftSource.MODEL:
            history = [*row.pieces, *draft.pieces[:-1]]
            wanted = [model._logits(tuple(history[: len(row.pieces) + n])).softmax(0) for n in range(len(draft.pieces))]
            torch.testing.assert_close(draft.draft_probs_KD, torch.stack(wanted).float())
        row.pieces += emitted
        other.pieces += [3, 2, 2]
    assert kinds[0] is DraftSource.MODEL
    assert set(kinds[2:31]) == {DraftSource.LOOKUP}, "ninety pieces and more were not read in between"
    assert kinds[-1] is DraftSource.MODEL


def verdict_of(draft: Draft, accepted: int) -> Verdict:
    """One token per piece; so many were accepted, the next was not."""
    tokens = tuple(ProposedToken(piece, n, n + 1, ()) for n, piece in enumerate(draft.pieces))
    decisions = tuple(
        Decided(n, token, Outcome.ACCEPTED, token.token, Origin.ACCEPTED) for n, token in enumerate(tokens[:accepted])
    )
    return Verdict(Proposal(draft, tokens), decisions, (), accepted, accepted)


class RecordingSelector(DraftSourceSelector):
    def __init__(self) -> None:
        super().__init__(COSTS)
        self.noted: list[tuple] = []

    def observe_copy(self, match: int, copied: Sequence[int], emitted: Sequence[int]) -> None:
        self.noted.append(("copy", match, tuple(copied[:3]), tuple(emitted)))

    def count_copy(self, match: int) -> None:
        self.noted.append(("drafted", match))

    def observe_model(self, match: int | None, drafted: int, accepted: int) -> None:
        self.noted.append(("model", match, drafted, accepted))


def test_what_was_emitted_judges_the_copy_that_was_not_drafted_too():
    selector = RecordingSelector()  # knows nothing: the model drafts
    stage = new_stage(selector)
    rows = admit(stage, row_of([1, 2, 3, 4, 1, 2], offset=0), row_of([1, 2, 3, 4, 5], offset=1))
    drafts = stage(rows)
    for row in rows:
        row.pieces += [3, 0]
    stage.observe([verdict_of(draft, accepted=2) for draft in drafts])
    assert selector.noted == [("copy", 2, (3, 4, 1), (3, 0)), ("model", 2, 3, 2), ("model", None, 3, 2)]


def test_a_copy_that_was_drafted_is_judged_as_a_lookup():
    selector = RecordingSelector()
    selector.choose_length = lambda match, most: Copy(most, 2.0)
    stage = new_stage(selector)
    (row,) = admit(stage, row_of([1, 2, 3, 4, 1, 2]))
    (draft,) = stage([row])
    row.pieces += [3, 5]
    stage.observe([verdict_of(draft, accepted=1)])
    assert selector.noted == [("copy", 2, (3, 4, 1), (3, 5)), ("drafted", 2)]


def test_the_models_drafting_observes_its_own_drafts_alone():
    stage, observed = new_stage(), []
    stage._decode.observe = observed.append
    rows = admit(stage, row_of([1, 2, 3, 4, 1, 2], offset=0), row_of([1, 2, 3, 4, 5], offset=1))
    copied, drafted = (verdict_of(draft, accepted=1) for draft in stage(rows))
    assert copied.proposal.draft.source is DraftSource.LOOKUP
    stage.observe([copied, drafted])
    stage.observe([copied])
    assert observed == [[drafted]]


def test_nothing_of_a_row_is_kept_after_a_block_and_its_release():
    stage = new_stage()
    row, _ = admit(stage, row_of([1, 2, 1, 2]), row_of([3]))
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


# Several sources.


class FixedSource(CopySource):
    """Offers the same pieces to every row."""

    source = DraftSource.LOOKUP

    def __init__(self, key: str, pieces: tuple[int, ...], rate: float) -> None:
        self.key, self._offer = key, Offer(pieces, rate) if pieces else None
        self.rows: list[SequenceState] = []
        self.offers = self.state = 0
        self.observed: list[Verdict] = []

    def admit(self, row: SequenceState) -> None:
        self.rows.append(row)

    def release(self, row: SequenceState) -> None:
        self.rows.remove(row)

    def offer(self, row: SequenceState) -> Offer | None:
        self.offers += 1
        return self._offer

    def observe(self, verdict: Verdict) -> None:
        self.observed.append(verdict)

    def save(self) -> Saved:
        return self.state

    def restore(self, saved: Saved, reader: SnapshotReader) -> None:
        assert not self.rows, "rows are admitted after it"
        self.state = reader.decode(int, saved)


def stage_over(*sources: CopySource) -> DecodeOrLookup:
    return DecodeOrLookup(new_stage()._decode, sources)


def test_of_several_sources_the_one_that_expects_most_drafts_and_all_learn_of_it():
    few, many, none = FixedSource("few", (1,), 1.5), FixedSource("many", (2, 3), 2.5), FixedSource("none", (), 9.0)
    stage = stage_over(few, many, none)
    (row,) = admit(stage, row_of([1, 2, 3]))
    (draft,) = stage([row])
    assert (draft.pieces, draft.source) == ((2, 3), DraftSource.LOOKUP)
    assert [source.offers for source in (few, many, none)] == [1, 1, 1]
    verdict = verdict_of(draft, accepted=1)
    stage.observe([verdict])
    assert [source.observed for source in (few, many, none)] == [[verdict]] * 3
    stage.release(row)
    assert [source.rows for source in (few, many, none)] == [[], [], []]


def test_where_no_source_has_an_offer_the_model_drafts():
    stage = stage_over(FixedSource("none", (), 9.0))
    (row,) = admit(stage, row_of([1, 2, 3]))
    assert stage([row])[0].source is DraftSource.MODEL


def test_a_stage_is_resumed_with_each_source_s_state_and_begins_with_a_source_that_is_new():
    one, other = FixedSource("one", (1,), 1.5), FixedSource("other", (), 1.0)
    stage = stage_over(one, other)
    admit(stage, row_of([1, 2, 3]))
    one.state, other.state = 4, 5
    writer = SnapshotWriter()
    stage._decode.model.save_rows = lambda keep: None
    kept = SnapshotReader(writer.files(stage.save(writer)))
    sources = FixedSource("other", (), 1.0), FixedSource("new", (), 1.0), FixedSource("one", (), 1.0)
    resumed = stage_over(*sources)
    resumed._decode.model.restore_rows = lambda saved, kept: None
    resumed.restore(kept.state, kept)
    assert [source.state for source in sources] == [5, 0, 4]
    assert [[row.tokens for row in source.rows] for source in sources] == [[[1, 2, 3]]] * 3


def test_every_source_but_the_model_is_in_the_table():
    assert {DraftSource.MODEL, *SOURCES} == set(DraftSource)
    made = make_sources(DraftSettings(), COSTS, 1, range(PIECES))
    assert [source.source for source in made] == list(SOURCES)
    assert len({source.key for source in made}) == len(made)
    assert make_sources(DraftSettings(lookup=False), COSTS, 1, range(PIECES)) == []
