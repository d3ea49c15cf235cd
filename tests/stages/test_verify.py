"""Verification of a block: what is appended to the row, what is counted, and where it ends."""

import math

import pytest
import torch
from doubles import TableModel, row_of
from torch import Tensor

from stages.contract.blocks import Draft, OffPolicySpan, Proposal, SequenceState, Verdict
from stages.examples.teacher import Supervision, supervise_nothing
from stages.ngrams.trie import Trie
from stages.rules import TrieRule
from stages.sampling.distributions import Sampling
from stages.translate import parse
from stages.verify import Verify, _outcome_distribution, passed_levels, truncate
from stages.vocabulary.text_stream import StopStrings
from store.errors import ModelError
from store.events import Origin, Outcome

SPELLING = ((0,), (1,), (0, 1), (2,), None, (3,))
END = 5
BRANCH = OffPolicySpan(0, (1,), ())
CONTEXT = tuple(pieces or () for pieces in SPELLING)


def counts_up(history: tuple[int, ...]) -> Tensor:
    """Greedy, the target emits the number after the last one; of ids beyond the tokenizer it would give others."""
    logits = torch.zeros(8)
    logits[(history[-1] + 1) % 6] = 5.0
    logits[6:] = 99.0
    return logits


def verify_block(
    row: SequenceState, pieces: tuple[int, ...], *, teach=supervise_nothing, logits=counts_up, drafted: float = 1.0
) -> tuple[Verdict, TableModel]:
    trie = Trie(8, 4)
    trie.insert_all((spelt, token) for token, spelt in enumerate(SPELLING) if spelt)
    model = TableModel(logits, 8)
    verify = Verify(model, TrieRule(trie), Sampling(), CONTEXT, 6, {END}, teach)
    draft_probs_KD = drafted * torch.eye(4)[list(pieces)] if pieces else torch.zeros(0, 4)
    verify.admit(row)
    (verdict,) = verify([Proposal(Draft(row, pieces, draft_probs_KD, (), None, ()), parse(trie, pieces))])
    return verdict, model


def outcomes(verdict: Verdict) -> list[tuple]:
    return [(decision.outcome, decision.emitted, decision.origin) for decision in verdict.decisions]


def test_what_the_target_would_emit_is_accepted_and_one_more_is_added():
    row = row_of([4, 0], [2, 0])
    verdict, model = verify_block(row, (1, 0, 1))
    assert outcomes(verdict) == [
        (Outcome.ACCEPTED, 1, Origin.ACCEPTED),
        (Outcome.ACCEPTED, 2, Origin.ACCEPTED),
        (Outcome.UNDRAFTED, 3, Origin.BONUS),
    ]
    assert (verdict.emitted, verdict.judged, verdict.accepted) == ((1, 2, 3), 2, 2)
    assert row.tokens == [4, 0, 1, 2, 3]
    assert row.pieces == [2, 0, 1, 0, 1, 2], "the pieces of what was emitted"
    assert (row.remaining_tokens, row.block, row.finish, row.emitted) == (96, 1, "", 3)
    assert model.length(row) == 4, "the last token is read with the next block"


def test_the_first_difference_is_corrected_and_what_follows_is_not_judged():
    row = row_of([0])
    verdict, model = verify_block(row, (1, 0, 1, 2, 1))  # tokens 1, 2, 3, 1: the target emits 1, 2, 3, 4
    assert [outcome for outcome, *_ in outcomes(verdict)] == ["accepted", "accepted", "accepted", "rejected"]
    assert verdict.emitted == (1, 2, 3, 4)
    assert row.pieces == [0, 1, 0, 1, 2], "token 4 has no pieces"
    again = row_of([0])
    verdict, model = verify_block(again, (2, 1, 0))
    assert [outcome for outcome, *_ in outcomes(verdict)] == ["rejected", "unjudged", "unjudged"]
    assert (verdict.emitted, verdict.judged, verdict.accepted) == ((1,), 1, 0)
    assert model.length(again) == 1


def test_without_pieces_the_block_is_plain_decoding():
    row = row_of([0])
    verdict, _ = verify_block(row, ())
    assert outcomes(verdict) == [(Outcome.UNDRAFTED, 1, Origin.BONUS)]
    assert (verdict.judged, verdict.accepted, row.tokens) == (0, 0, [0, 1])


def test_an_end_of_sequence_stops_the_row_and_nothing_follows_it():
    row = row_of([4])
    verdict, _ = verify_block(row, (3, 0))
    assert verdict.emitted == (END,)
    assert len(verdict.decisions) == 1
    assert (row.finish, row.tokens) == ("stop", [4, END])


def test_the_remaining_tokens_are_never_exceeded():
    row = row_of([0], remaining_tokens=2)
    verdict, _ = verify_block(row, (1, 0, 1))
    assert (verdict.emitted, row.remaining_tokens, row.finish) == ((1, 2), 0, "length")
    assert (verdict.judged, verdict.accepted) == (2, 2)


def test_an_end_at_the_last_remaining_token_is_a_stop():
    row = row_of([4], remaining_tokens=1)
    verify_block(row, ())
    assert row.finish == "stop"


LETTERS = dict(enumerate([b"a", b"b", b"c", b"d", b"e"]))  # the end is no text


def stopping_row(tokens: list[int], *stops: str, remaining_tokens: int = 99) -> SequenceState:
    row = row_of(tokens, remaining_tokens=remaining_tokens)
    row.stop_strings = StopStrings(LETTERS.get, stops)
    return row


def test_a_stop_string_ends_the_block_with_the_token_that_completes_it():
    row = stopping_row([0], "bc")
    verdict, model = verify_block(row, (1, 0, 1, 2, 1))  # tokens 1, 2, 3 and 1, which would be rejected
    assert outcomes(verdict) == [(Outcome.ACCEPTED, 1, Origin.ACCEPTED), (Outcome.ACCEPTED, 2, Origin.ACCEPTED)]
    assert (verdict.emitted, verdict.judged, verdict.accepted) == ((1, 2), 2, 2)
    assert (row.tokens, row.finish, row.remaining_tokens) == ([0, 1, 2], "stop", 97)
    assert model.length(row) == 2


def test_a_stop_string_may_begin_in_an_earlier_block_but_not_in_the_prompt():
    trie = Trie(8, 4)
    row, model = stopping_row([0], "ab", "bcd"), TableModel(counts_up, 8)
    verify = Verify(model, TrieRule(trie), Sampling(), CONTEXT, 6, {END}, supervise_nothing)
    verify.admit(row)
    finishes = []
    while not row.finish:
        verify([Proposal(Draft(row, (), torch.zeros(0, 4), (), None, ()), ())])
        finishes.append(row.finish)
    assert (row.tokens, finishes) == ([0, 1, 2, 3], ["", "", "stop"])


def test_a_correction_may_complete_a_stop_string():
    verdict, _ = verify_block(row := stopping_row([0], "b"), (2, 1, 0))
    assert [outcome for outcome, *_ in outcomes(verdict)] == ["rejected"], "what was not judged never happened"
    assert (verdict.emitted, row.finish) == ((1,), "stop")


def test_a_stop_string_at_the_last_remaining_token_is_a_stop():
    verify_block(row := stopping_row([0], "bc", remaining_tokens=2), (1, 0, 1))
    assert (row.tokens, row.remaining_tokens, row.finish) == ([0, 1, 2], 0, "stop")


def test_a_stop_string_after_the_last_remaining_token_or_the_end_is_ignored():
    verify_block(row := stopping_row([0], "cd", remaining_tokens=2), (1, 0, 1, 2))
    assert (row.tokens, row.finish, row.stop_strings.complete) == ([0, 1, 2], "length", False)
    verify_block(row := stopping_row([4], "a"), (3, 0))
    assert (row.tokens, row.finish, row.stop_strings.complete) == ([4, END], "stop", False)


def test_a_private_row_has_no_soft_targets():
    def teach(batch, outcomes, logits_NV, starts):
        return [Supervision(("taught",), BRANCH)]

    row = row_of([0])
    row.private = True
    verdict, _ = verify_block(row, (1, 0, 1), teach=teach)
    assert (verdict.emitted, verdict.soft_targets, verdict.branch) == ((1, 2, 3), (), None)


def test_soft_target_is_made_before_the_row_grows():
    seen = []

    def teach(batch, outcomes, logits_NV, starts):
        emitted = [tuple(decision.emitted for decision in decisions) for decisions in outcomes]
        seen.append((len(batch[0].draft.row.tokens), emitted, tuple(logits_NV.shape), starts))
        return [Supervision(("taught",), BRANCH)]

    verdict, _ = verify_block(row_of([0]), (1, 0, 1), teach=teach)
    assert seen == [(1, [(1, 2, 3)], (3, 8), [0, 3])]
    assert (verdict.soft_targets, verdict.branch) == (("taught",), BRANCH)


@pytest.mark.parametrize(
    ("uniform", "passed"), [(0.0, 3), (0.0999, 3), (0.1, 2), (0.2, 1), (0.4999, 1), (0.5, 0), (0.999, 0)]
)
def test_one_number_passes_as_many_levels_as_the_products_allow(uniform: float, passed: int):
    assert passed_levels(((0.5, 0.5, 0.5), (0.25, 0.2, 0.25)), uniform) == passed  # products 0.5, 0.2, 0.1


def test_a_level_that_the_target_likes_better_than_the_drafter_is_always_passed():
    assert passed_levels(((0.2, 0.5), (0.9, 0.6)), 1 - 2**-24) == 2


def test_a_level_that_is_impossible_is_never_passed():
    assert passed_levels(((0.2,), (0.0,)), 0.0) == 0


@pytest.mark.parametrize("drafter", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("target", [0.0, 0.5, 1.0])
def test_a_level_that_the_drafter_cannot_have_drawn_from_is_never_passed(drafter: float, target: float):
    assert passed_levels(((drafter,), (target,)), 0.0) == 0
    assert passed_levels(((0.5, drafter), (0.5, target)), 0.0) == 1
    assert _outcome_distribution(((0.5, drafter, 0.5), (0.25, target, 0.5))).tolist() == [0.0, 0.0, 0.5, 0.5]


def test_a_level_that_the_target_has_no_number_for_is_never_passed():
    assert passed_levels(((0.5,), (math.nan,)), 0.0) == 0
    assert _outcome_distribution(((0.5,), (math.nan,))).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("drafted", [math.nan, math.inf])
@pytest.mark.parametrize("pieces", [(1, 0, 1), (2,)])
def test_what_a_broken_drafter_proposed_is_rejected_and_the_target_speaks(drafted: float, pieces: tuple[int, ...]):
    verdict, _ = verify_block(row_of([0]), pieces, drafted=drafted)
    assert (verdict.decisions[0].outcome, verdict.decisions[0].emitted) == (Outcome.REJECTED, 1)
    assert (verdict.emitted, verdict.accepted) == ((1,), 0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("pieces", [(), (1, 0, 1)], ids=["plain", "drafted"])
def test_a_target_that_is_not_finite_is_an_error_and_emits_nothing(wrong: float, pieces: tuple[int, ...]):
    def logits(history: tuple[int, ...]) -> Tensor:
        return counts_up(history).index_fill(0, torch.tensor([3]), wrong)

    row = row_of([0], offset=4)
    with pytest.raises(ModelError, match=r"logits must be finite, got NaN or infinity for prompt prompt:4 after 1 "):
        verify_block(row, pieces, logits=logits)
    assert row.tokens == [0]


def test_the_error_names_the_row_whose_target_is_not_finite():
    def logits(history: tuple[int, ...]) -> Tensor:
        return counts_up(history) if history[0] == 0 else torch.full((8,), math.nan)

    rows = [row_of([0], offset=0), row_of([0, 1], offset=1), row_of([2, 3], offset=2)]
    verify = Verify(TableModel(logits, 8), TrieRule(Trie(8, 4)), Sampling(), CONTEXT, 6, {END}, supervise_nothing)
    for row in rows:
        verify.admit(row)
    with pytest.raises(ModelError, match="prompt:2 after 2 tokens"):
        verify([Proposal(Draft(row, (), torch.zeros(0, 4), (), None, ()), ()) for row in rows])


def test_ids_that_are_never_emitted_may_be_anything():
    def logits(history: tuple[int, ...]) -> Tensor:
        return counts_up(history).index_fill(0, torch.tensor([6, 7]), math.nan)

    assert verify_block(row_of([0]), (1,), logits=logits)[0].emitted == (1, 2)


def test_decisions_that_emit_nothing_do_not_use_up_the_remaining_tokens():
    verdict, _ = verify_block(row_of([0], remaining_tokens=1), (2, 1, 0))
    assert [decision.emitted for decision in verdict.decisions] == [1]
    whole, _ = verify_block(row_of([0]), (2, 1, 0))
    assert truncate(whole.decisions, 2, ()) == whole.decisions


def test_nothing_is_computed_for_rows_that_give_no_example():
    seen = []

    def teach(batch, outcomes, logits_NV, starts):
        seen.append(([proposal.draft.row.offset for proposal in batch], list(starts)))
        return [Supervision((), OffPolicySpan(proposal.draft.row.offset, (), ())) for proposal in batch]

    rows = [row_of([0], offset=number) for number in range(4)]
    rows[0].record_example, rows[2].private = False, True
    verify = Verify(TableModel(counts_up, 8), TrieRule(Trie(8, 4)), Sampling(), CONTEXT, 6, {END}, teach)
    for row in rows:
        verify.admit(row)
    proposals = [Proposal(Draft(row, (), torch.zeros(0, 4), (), None, ()), ()) for row in rows]
    verdicts = verify(proposals)
    assert seen == [([1, 3], [1, 3])]
    assert [verdict.branch and verdict.branch.start for verdict in verdicts] == [None, 1, None, 3]
