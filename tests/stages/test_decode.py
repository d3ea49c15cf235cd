"""Drafting: every recorded distribution is the drafter's after the row as it now is, and drafts end where they must."""

import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from doubles import TableModel, row_of
from torch import Tensor

from stages.contract.blocks import Draft, SequenceState
from stages.decode import Decode
from stages.drafting.head import AcceptanceHead
from stages.drafting.stopping import FixedLength, StopRule
from stages.sampling.distributions import Sampling

PIECES = 6
END = 5
ALLOWED = {0, 1, 2, 4, END}


def logits(history: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.random.default_rng([3, *history]).normal(0, 1.5, PIECES))


def new_decode(*, stop_rule: StopRule | None = None, max_draft: int = 4, end: int | None = None, **sampling) -> Decode:
    model = TableModel(logits, PIECES)
    head = AcceptanceHead(model.hidden_size, 0)
    chosen = Sampling(**sampling or {"temperature": 1.0})
    return Decode(model, head, stop_rule or FixedLength(), chosen, ALLOWED, max_draft, end, torch.float64)


def distribution_after(pieces: list[int], sampling: Sampling) -> Tensor:
    allowed = logits(tuple(pieces))
    allowed[3] = -torch.inf
    return sampling.distribution(allowed[None], torch.float64)[0]


def assert_distributions_are_the_drafters(row: SequenceState, draft: Draft, sampling: Sampling) -> None:
    for place, (piece, draft_probs_D) in enumerate(zip(draft.pieces, draft.draft_probs_KD, strict=True)):
        want_D = distribution_after([*row.pieces, *draft.pieces[:place]], sampling)
        torch.testing.assert_close(draft_probs_D, want_D)
        assert draft_probs_D[piece] > 0
        assert draft.entropies[place] == pytest.approx(float(torch.special.entr(want_D).sum()))


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 2}])
def test_distributions_are_the_drafters_whatever_became_of_the_draft_before(sampling: dict):
    decode, rows = (
        new_decode(**sampling),
        [row_of([0, 1], offset=0), row_of([2, 2, 2], offset=1), row_of([4], offset=2)],
    )
    for row in rows:
        decode.admit(row)
    fates = np.random.default_rng(0)
    for _ in range(6):
        for row, draft in zip(rows, decode(rows), strict=True):
            assert draft.row is row
            assert_distributions_are_the_drafters(row, draft, Sampling(**sampling))
            kept = int(fates.integers(0, len(draft.pieces) + 1))
            row.pieces += [*draft.pieces[:kept], *fates.integers(0, PIECES, fates.integers(0, 3)).tolist()]


def test_a_row_with_a_transform_of_its_own_is_drafted_by_that():
    own = [None, Sampling(0.0), Sampling(0.7, 2, 0.9), None]
    decode, rows = new_decode(), [row_of([0, 1], offset=offset) for offset in range(4)]
    for row, sampling in zip(rows, own, strict=True):
        row.sampling = sampling
        decode.admit(row)
    for _ in range(3):
        for draft, sampling in zip(decode(rows), own, strict=True):
            assert_distributions_are_the_drafters(draft.row, draft, sampling or Sampling(1.0))
            draft.row.pieces += draft.pieces[:1]


def test_a_long_draft_that_is_rejected_at_once_is_forgotten():
    decode, row = new_decode(max_draft=64), row_of([0, 1])
    decode.admit(row)
    for piece in (2, 4):
        (draft,) = decode([row])
        assert len(draft.pieces) == 64
        assert_distributions_are_the_drafters(row, draft, Sampling(1.0))
        row.pieces.append(piece)


def test_a_text_that_did_not_change_is_read_on_from_its_last_piece():
    """A token without pieces was emitted."""
    decode, row = new_decode(max_draft=1), row_of([0, 1])
    decode.admit(row)
    for _ in range(2):
        (draft,) = decode([row])
        assert_distributions_are_the_drafters(row, draft, Sampling(1.0))


def test_what_spells_no_target_token_is_never_drafted():
    decode, rows = new_decode(max_draft=8), [row_of([0], offset=offset) for offset in range(20)]
    for row in rows:
        decode.admit(row)
    drafted = {piece for draft in decode(rows) for piece in draft.pieces}
    assert drafted == ALLOWED


@pytest.mark.parametrize(("max_draft", "remaining", "lengths"), [(4, (9, 2, 1), [4, 2, 1]), (0, (9, 2, 1), [0, 0, 0])])
def test_a_draft_is_no_longer_than_the_limit_and_the_remaining_tokens(
    max_draft: int, remaining: tuple, lengths: list[int]
):
    decode = new_decode(max_draft=max_draft)
    rows = [
        row_of([0, 1], offset=offset, remaining_tokens=remaining_tokens)
        for offset, remaining_tokens in enumerate(remaining)
    ]
    for row in rows:
        decode.admit(row)
    drafts = decode(rows)
    assert [len(draft.pieces) for draft in drafts] == lengths
    assert [tuple(draft.draft_probs_KD.shape) for draft in drafts] == [(length, PIECES) for length in lengths]


def test_nothing_is_drafted_after_the_drafters_end():
    decode = new_decode(max_draft=8, end=END)
    rows = [row_of([0], offset=offset) for offset in range(20)]
    for row in rows:
        decode.admit(row)
    drafts = decode(rows)
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
    rule = StopAt(3)
    decode, row = new_decode(stop_rule=rule), row_of([0, 1])
    decode.admit(row)
    (draft,) = decode([row])
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
    head, chosen = AcceptanceHead(model.hidden_size, 0), Sampling(**sampling or {"temperature": 1.0})
    return Decode(model, head, FixedLength(), chosen, ALLOWED, 4, None, torch.float64)


def only(decode: Decode, rows: Sequence[SequenceState]) -> list[Draft]:
    for row in rows:
        decode.admit(row)
    return decode(rows)


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_where_the_distribution_is_not_finite_that_row_drafts_nothing_and_others_do(wrong: float, sampling: dict):
    rows = [row_of([0, 1], offset=0), row_of([2, 2], offset=1), row_of([4], offset=2)]
    drafts = only(decode := broken_decode(wrong, {(2, 2)}, **sampling), rows)
    assert [len(draft.pieces) for draft in drafts] == [4, 0, 4]
    assert [len(draft.draft_probs_KD) for draft in drafts] == [4, 0, 4]
    for draft in (drafts[0], drafts[2]):
        assert_distributions_are_the_drafters(draft.row, draft, Sampling(**sampling))
    assert decode.unusable == 1


def test_a_draft_ends_before_the_place_where_the_distribution_is_not_finite():
    (whole,) = only(broken_decode(math.nan, set()), [row_of([0, 1])])
    begun = (0, 1, *whole.pieces[:2])
    (draft,) = only(decode := broken_decode(math.nan, {begun}), [row := row_of([0, 1])])
    assert draft.pieces == whole.pieces[:2]
    assert_distributions_are_the_drafters(row, draft, Sampling(1.0))
    row.pieces += [4, 0]
    (after,) = decode([row])
    assert len(after.pieces) == 4, "what was not finite there is not so for ever"
    assert_distributions_are_the_drafters(row, after, Sampling(1.0))


def test_the_user_is_warned_once_and_how_often_at_the_end(caplog):
    caplog.set_level(logging.WARNING, "omnidraft")
    rows = [row_of([0, 1], offset=0), row_of([2, 2], offset=1)]
    only(decode := broken_decode(math.nan, {(0, 1), (2, 2)}), rows)
    decode(rows)
    assert [record.message[:37] for record in caplog.records] == ["the drafter's logits must be finite, "[:37]]
    decode.report()
    assert caplog.records[-1].message.startswith("4 drafts ended early")


def test_nothing_is_reported_of_a_drafter_that_is_well(caplog):
    caplog.set_level(logging.WARNING, "omnidraft")
    only(decode := new_decode(), [row_of([0, 1])])
    decode.report()
    assert (decode.unusable, caplog.records) == (0, [])


def test_a_skipped_row_draws_nothing():
    def drafts_with(remaining_of_other: int) -> tuple[Draft, float]:
        decode = new_decode()
        rows = [
            row_of([0, 1], offset=0, remaining_tokens=2),
            row_of([1], offset=1, remaining_tokens=remaining_of_other),
        ]
        for row in rows:
            decode.admit(row)
        return decode(rows)[0], rows[0].rng.uniform(torch.ones(1))

    (short, after_short), (long, after_long) = drafts_with(1), drafts_with(9)
    assert (short.pieces, after_short) == (long.pieces, after_long)
