"""Drafting: every recorded distribution is the drafter's after the row as it now is, and drafts end where they must."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from doubles import TableModel, row_of
from torch import Tensor

from stages.contract.blocks import Draft, SequenceState
from stages.decode import Decode
from stages.drafting.costs import Costs
from stages.drafting.head import EXTRA_FEATURES, AcceptanceHead
from stages.drafting.selection import Selection
from stages.drafting.sources import TRIED_BLOCKS
from stages.drafting.stopping import FixedLength, StopRule
from stages.ngrams.trie import Trie
from stages.prompts.prompt_reader import PromptReader
from stages.sampling.distributions import to_distribution
from stages.sampling.params import SamplingParams
from stages.verification.parsing import parse

PIECES = 6
END = 5
ALLOWED = {0, 1, 2, 4, END}


def logits(history: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.random.default_rng([3, *history]).normal(0, 1.5, PIECES))


def new_decode(
    *,
    stop_rule: StopRule | None = None,
    max_draft: int = 4,
    end: int | None = None,
    state_logits: Callable[[Tensor], Tensor] | None = None,
    **sampling,
) -> Decode:
    model = TableModel(logits, PIECES)
    head = AcceptanceHead(model.hidden_size, 0)
    chosen, rule = SamplingParams(**sampling or {"temperature": 1.0}), stop_rule or FixedLength()
    return Decode(model, head, rule, chosen, ALLOWED, max_draft, end, torch.float64, state_logits)


def first_drafts(decode: Decode, *rows: SequenceState) -> list[Draft]:
    for row in rows:
        decode.admit(row)
    return decode(rows)


def distribution_after(pieces: list[int], sampling: SamplingParams) -> Tensor:
    allowed = logits(tuple(pieces))
    allowed[3] = -torch.inf
    return to_distribution(allowed[None], sampling, torch.float64)[0]


def assert_distributions_are_the_drafters(
    row: SequenceState, draft: Draft, sampling: SamplingParams, begin: int = 0
) -> None:
    for place, (piece, draft_probs_D) in enumerate(zip(draft.pieces, draft.draft_probs_KD, strict=True)):
        want_D = distribution_after([*row.pieces[begin:], *draft.pieces[:place]], sampling)
        torch.testing.assert_close(draft_probs_D, want_D)
        assert draft_probs_D[piece] > 0
        assert draft.entropies[place] == pytest.approx(float(torch.special.entr(want_D).sum()))


def test_a_text_is_read_before_its_first_draft_which_may_never_come():
    decode, sampling = new_decode(), SamplingParams(temperature=1.0)
    decode.reader = PromptReader(decode.model, 4, None, text=lambda row: row.pieces)  # type: ignore[arg-type]
    drafting, idle = row_of([0, 1, 2, 4, 0, 2], offset=0), row_of([1, 2, 4], offset=1)
    for row in (drafting, idle):
        decode.admit(row)
    for pieces in (6, 0):
        first, second = decode([drafting, idle], skipped={idle})
        assert_distributions_are_the_drafters(drafting, first, sampling)
        assert (second.pieces, decode.model.length(idle)) == ((), 0)
        assert [decode.has_read(row) for row in (drafting, idle)] == [True, False]
        assert (decode.prompts.pieces, decode.prompts.seconds > 0) == (pieces, pieces > 0)
    assert decode.reader.counts.tokens == 6, "of the text that was read, once"
    idle.pieces.append(0)  # emitted without a draft
    _, second = decode([drafting, idle])
    assert_distributions_are_the_drafters(idle, second, sampling)
    assert decode.reader.counts.tokens == 10


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 2}])
def test_distributions_are_the_drafters_whatever_became_of_the_draft_before(sampling: dict):
    decode, rows = new_decode(**sampling), [row_of([0, 1]), row_of([2, 2, 2], offset=1), row_of([4], offset=2)]
    for row in rows:
        decode.admit(row)
    fates = np.random.default_rng(0)
    for _ in range(6):
        for row, draft in zip(rows, decode(rows), strict=True):
            assert draft.row is row
            assert_distributions_are_the_drafters(row, draft, SamplingParams(**sampling))
            kept = int(fates.integers(0, len(draft.pieces) + 1))
            row.pieces += [*draft.pieces[:kept], *fates.integers(0, PIECES, fates.integers(0, 3)).tolist()]


def test_the_targets_state_is_part_of_the_recorded_distribution_and_fades_along_the_draft():
    term_D = torch.linspace(-2, 2, PIECES).double()
    decode = new_decode(state_logits=lambda states_BS: states_BS[:, :1].double() * term_D)
    rows = [row_of([0, 1], offset=0), row_of([2, 2, 2], offset=1), row_of([0, 1], offset=0)]
    rows[0].target_state, rows[1].target_state = torch.tensor([1, 5]), torch.tensor([-2, 5])
    for row, factor, draft in zip(rows, (1, -2, 0), first_drafts(decode, *rows), strict=True):
        for place, draft_probs_D in enumerate(draft.draft_probs_KD):
            want_D = logits((*row.pieces, *draft.pieces[:place])) + 0.5**place * factor * term_D
            want_D[3] = -torch.inf
            torch.testing.assert_close(draft_probs_D, want_D.softmax(-1))


def test_what_spells_no_target_token_is_never_drafted():
    drafts = first_drafts(new_decode(max_draft=8), *(row_of([0], offset=offset) for offset in range(20)))
    assert {piece for draft in drafts for piece in draft.pieces} == ALLOWED


@pytest.mark.parametrize(("max_draft", "remaining", "lengths"), [(4, (9, 2, 1), [4, 2, 1]), (0, (9, 2, 1), [0, 0, 0])])
def test_a_draft_is_no_longer_than_the_limit_and_the_remaining_tokens(
    max_draft: int, remaining: tuple, lengths: list[int]
):
    rows = [row_of([0, 1], offset=offset, remaining_tokens=tokens) for offset, tokens in enumerate(remaining)]
    drafts = first_drafts(new_decode(max_draft=max_draft), *rows)
    assert [len(draft.pieces) for draft in drafts] == lengths
    assert [tuple(draft.draft_probs_KD.shape) for draft in drafts] == [(length, PIECES) for length in lengths]


def test_nothing_is_drafted_after_the_drafters_end():
    drafts = first_drafts(new_decode(max_draft=8, end=END), *(row_of([0], offset=offset) for offset in range(20)))
    ended = [draft for draft in drafts if END in draft.pieces]
    assert ended
    assert all(draft.pieces.index(END) == len(draft.pieces) - 1 for draft in ended)
    assert all(len(draft.pieces) == 8 for draft in drafts if draft not in ended)


class StopAt:
    """Stops at a given length, and records the survivals that it gets."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, []

    def select_rows(self, survivals: Sequence[tuple[float, ...]], open_rows: Sequence[int]) -> list[int]:
        self.seen.extend(tuple(survivals[row]) for row in open_rows)
        return [row for row in open_rows if len(survivals[row]) < self.length]


def test_the_stop_rule_is_called_after_every_piece_for_the_chance_that_all_are_accepted():
    decode = new_decode(stop_rule=(rule := StopAt(3)))
    (draft,) = first_drafts(decode, row_of([0, 1]))
    assert [len(survival) for survival in rule.seen] == [1, 2, 3]
    assert rule.seen[-1] == draft.survival
    with torch.inference_mode():
        chances = decode.head(draft.features_KF).sigmoid().cumprod(0).tolist()
    assert draft.survival == pytest.approx(chances)


def broken_decode(wrong: float, histories: set[tuple[int, ...]], **sampling: float) -> Decode:
    """A drafter that gives one allowed piece this logit after these texts, and forbidden ones NaN after all."""

    def with_one(history: tuple[int, ...]) -> Tensor:
        found = logits(history).index_fill(0, torch.tensor([3]), math.nan)
        return found.index_fill(0, torch.tensor([2]), wrong) if history in histories else found

    model = TableModel(with_one, PIECES)
    head, chosen = AcceptanceHead(model.hidden_size, 0), SamplingParams(**sampling or {"temperature": 1.0})
    return Decode(model, head, FixedLength(), chosen, ALLOWED, 4, None, torch.float64)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_where_the_distribution_is_not_finite_that_row_drafts_nothing_and_others_do(wrong: float, sampling: dict):
    rows = [row_of([0, 1], offset=0), row_of([2, 2], offset=1), row_of([4], offset=2)]
    drafts = first_drafts(decode := broken_decode(wrong, {(2, 2)}, **sampling), *rows)
    assert [len(draft.pieces) for draft in drafts] == [4, 0, 4]
    assert [len(draft.draft_probs_KD) for draft in drafts] == [4, 0, 4]
    for draft in (drafts[0], drafts[2]):
        assert_distributions_are_the_drafters(draft.row, draft, SamplingParams(**sampling))
    assert decode.unusable == 1


def test_a_draft_ends_before_the_place_where_the_distribution_is_not_finite():
    (whole,) = first_drafts(broken_decode(math.nan, set()), row_of([0, 1]))
    begun = (0, 1, *whole.pieces[:2])
    (draft,) = first_drafts(decode := broken_decode(math.nan, {begun}), row := row_of([0, 1]))
    assert draft.pieces == whole.pieces[:2]
    assert_distributions_are_the_drafters(row, draft, SamplingParams(1.0))
    row.pieces += [4, 0]
    (after,) = decode([row])
    assert len(after.pieces) == 4, "what was not finite there is not so for ever"
    assert_distributions_are_the_drafters(row, after, SamplingParams(1.0))


def test_a_skipped_row_draws_nothing():
    def drafts_with(remaining_of_other: int) -> tuple[Draft, float]:
        row, other = row_of([0, 1], remaining_tokens=2), row_of([1], offset=1, remaining_tokens=remaining_of_other)
        return first_drafts(new_decode(), row, other)[0], row.rng.uniform(torch.ones(1))

    (short, after_short), (long, after_long) = drafts_with(1), drafts_with(9)
    assert (short.pieces, after_short) == (long.pieces, after_long)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}])
def test_the_head_reads_the_distribution_at_temperature_1_in_every_mode(sampling: dict):
    (draft,) = first_drafts(new_decode(**sampling), row := row_of([0, 1]))
    assert len(draft.pieces) == 4
    for place, (piece, features_F) in enumerate(zip(draft.pieces, draft.features_KF, strict=True)):
        probs_D = distribution_after([*row.pieces, *draft.pieces[:place]], SamplingParams(1.0)).float()
        first, second = probs_D.topk(2).values.tolist()
        entropy = float(torch.special.entr(probs_D).sum())
        want = [float(probs_D[piece].log()), entropy, place / 8, first, first - second]
        assert features_F[-EXTRA_FEATURES:].tolist() == pytest.approx(want, abs=1e-5)
    varied = draft.features_KF[:, -EXTRA_FEATURES:]
    assert all(float(column.std()) > 0.01 for column in varied.T), "none is constant, at temperature 0 either"


def test_greedy_drafting_draws_no_random_numbers():
    (draft,) = first_drafts(new_decode(temperature=0.0), row := row_of([0, 1], rng=Mock(spec=[])))  # no number
    for place, piece in enumerate(draft.pieces):
        assert piece == int(distribution_after([*row.pieces, *draft.pieces[:place]], SamplingParams(1.0)).argmax())
    assert draft.entropies == (0.0,) * 4


def test_a_row_that_samples_draws_the_same_numbers_next_to_greedy_rows():
    def draft_with(others: int) -> Draft:
        rows = [row_of([0, 1], offset=0), *(row_of([2, 2], offset=1 + n) for n in range(others))]
        for row in rows[1:]:
            row.sampling = SamplingParams(0.0)
        return first_drafts(new_decode(), *rows)[0]

    alone, accompanied = draft_with(0), draft_with(2)
    assert alone.pieces == accompanied.pieces
    torch.testing.assert_close(alone.draft_probs_KD, accompanied.draft_probs_KD)


def selecting_decode(**settings: Any) -> Decode:
    decode = new_decode(**settings)
    decode.selection = Selection(Costs(((1, 10.0), (11, 20.0)), ((1, 1.0),)), Trie(PIECES, PIECES), parse)
    return decode


def test_the_last_pieces_of_a_greedy_draft_may_stay_unverified_but_in_trials_the_head_gets_all_labels():
    decode, rows = selecting_decode(temperature=0.0), [row_of([0, 1], offset=offset) for offset in (0, 1)]
    for row in rows:
        decode.admit(row)
    for block in range(2 * TRIED_BLOCKS):
        for row in rows:
            row.block = block
        assert [draft.droppable for draft in decode(rows)] == [True, block % TRIED_BLOCKS != 1]
    assert not any(draft.droppable for draft in decode(rows, whole=True))


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}])
def test_a_piece_that_was_drawn_at_random_is_always_verified(sampling: dict):
    """A draft that ended where an unlikely piece was drawn would change the distribution of the text."""
    (draft,) = first_drafts(selecting_decode(**sampling), row_of([0, 1], offset=1))
    assert (len(draft.pieces), draft.droppable) == (4, False)


@pytest.mark.parametrize("length", [2, 6, 7, 30])
def test_of_a_text_that_the_context_does_not_hold_the_end_is_read(length: int):
    """With the longest draft, 10 pieces: 6 of a text. From the seventh on, it reads the last three and goes on."""
    decode, row = new_decode(max_draft=4), row_of([0, 2, 1] * (length // 3) + [1] * (length % 3), remaining_tokens=99)
    decode.model.max_length = 10
    decode.model.state_dict = decode.model.load_state_dict = lambda _: None
    decode.reader = PromptReader(decode.model, 4, None, text=lambda row: row.pieces)  # type: ignore[arg-type]
    decode.admit(row)
    begin = length - 3 if length > 6 else 0
    for piece in (2, 4, 2, 0, 1, 2, 4, 1, 1, 0, 2):
        begin = len(row.pieces) - 3 if len(row.pieces) - begin > 6 else begin
        (draft,) = decode([row])
        assert len(draft.pieces) == 4
        assert decode.model.length(row) <= 10
        assert_distributions_are_the_drafters(row, draft, SamplingParams(1.0), begin)
        decode.load_state_dict(decode.state_dict([row]))  # the model keeps its cache
        row.pieces.append(piece)


def test_a_text_that_did_not_change_is_read_on_from_its_last_piece():
    """A token without pieces was emitted."""
    decode, row = new_decode(max_draft=1), row_of([0, 1])
    decode.admit(row)
    for _ in range(2):
        (draft,) = decode([row])
        assert_distributions_are_the_drafters(row, draft, SamplingParams(1.0))


def test_what_was_drafted_and_rejected_is_no_longer_counted_as_read():
    decode, row = new_decode(), row_of([0, 1])
    decode.admit(row)
    for piece in (2, 4, 2, 2, 0):
        decode([row])
        row.pieces.append(piece)
        assert decode._read[row] == decode.model.tokens_read(row)
