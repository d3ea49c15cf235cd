"""From verdicts to events: the value of each column, for every outcome of a block."""

from dataclasses import replace

import pytest
import torch

from pipeline.recorder import PromptCounters, Recorder, Seconds, Versions, without_text
from stages.contract.blocks import (
    Candidate,
    Decision,
    Draft,
    Proposal,
    ProposedToken,
    SequenceState,
    TokenTree,
    Verdict,
)
from stages.sampling.logprobs import RawValues
from stages.sampling.random_source import SeededRandomSource
from store.events import BlockDone, DraftSource, Origin, Outcome, PromptRejected, TokenDecision, Translation

WORDS = {10: b"to", 11: b"day", 12: b"\xe2\x82", 13: None}
VERSIONS = Versions(drafter=4, head=5, cache=6)
RECORDER = Recorder("big", WORDS.__getitem__, lambda tokens: "+".join(map(str, tokens)))


def row_with(emitted: tuple[int, ...]) -> SequenceState:
    """A row after its third block, which emitted these; two tokens came before."""
    tokens = [1, 2, 3, 10, 11, *emitted]
    return SequenceState(
        7, "docs:8", "docs", "a b", tokens, 3, [1], SeededRandomSource(0, 7), 9, block=3, finish="length"
    )


def draft_of(row: SequenceState, pieces: tuple[int, ...], *, survival: bool = True) -> Draft:
    size = len(pieces)
    chances = tuple(0.9**number for number in range(1, size + 1)) if survival else ()
    return Draft(row, pieces, torch.ones(size, 1), tuple(float(number) for number in range(size)), None, chances)


def accept(index: int, proposed: ProposedToken, token: int) -> Decision:
    levels = {"drafter_levels": (0.5, 0.25), "target_levels": (0.75, 0.5), "uniform": 0.125}
    return Decision(index, proposed, Outcome.ACCEPTED, token, Origin.ACCEPTED, **levels, passed_levels=2)


def rejected_verdict() -> Verdict:
    """Four pieces: an accepted n-gram, a rejected token with its residual, one that was never judged."""
    row = row_with((10, 12))
    tokens = (ProposedToken(10, 0, 2, ()), ProposedToken(11, 2, 3, ()), ProposedToken(10, 3, 4, ()))
    decisions = (
        accept(0, tokens[0], 10),
        Decision(1, tokens[1], Outcome.REJECTED, 12, Origin.RESIDUAL, (0.5,), (0.1,), 0.9, 0),
        Decision(2, tokens[2], Outcome.UNJUDGED, None, None, (0.5,), (0.1,)),
    )
    return Verdict(Proposal(draft_of(row, (20, 21, 22, 23)), tokens), decisions, (10, 12), judged=2, accepted=1)


def decisions_of(verdict: Verdict) -> list[TokenDecision]:
    return list(RECORDER.record_decisions(verdict, VERSIONS))


def test_a_decision_records_where_it_was_made():
    for index, decision in enumerate(decisions_of(rejected_verdict())):
        assert (decision.offset, decision.prompt_id, decision.dataset) == (7, "docs:8", "docs")
        assert (decision.target, decision.block, decision.index) == ("big", 2, index)
        assert decision.position == 2 + index, "two tokens of the completion came before the block"
        assert (decision.drafter_version, decision.head_version, decision.cache_version) == (4, 5, 6)


def test_an_accepted_ngram():
    first = decisions_of(rejected_verdict())[0]
    assert (first.pieces, first.translation, first.outcome) == ((20, 21), Translation.NGRAM, Outcome.ACCEPTED)
    assert (first.proposed_id, first.proposed_bytes) == (first.emitted_id, first.emitted_bytes) == (10, b"to")
    assert (first.drafter_levels, first.target_levels, first.uniform) == ((0.5, 0.25), (0.75, 0.5), 0.125)
    assert first.origin is Origin.ACCEPTED
    assert first.entropy == 0.0, "of its first piece"
    assert first.head_estimate == pytest.approx(0.81), "up to its last piece"


def test_a_rejected_token_and_its_residual():
    second = decisions_of(rejected_verdict())[1]
    assert (second.pieces, second.translation, second.outcome) == ((22,), Translation.DIRECT, Outcome.REJECTED)
    assert (second.proposed_id, second.proposed_bytes) == (11, b"day")
    assert (second.emitted_id, second.emitted_bytes, second.origin) == (12, b"\xe2\x82", Origin.RESIDUAL)


def test_what_the_models_themselves_found_likely():
    verdict = rejected_verdict()
    features_KF = torch.zeros(4, 8)  # 3 of a hidden state, then the log probability and the entropy of each piece
    features_KF[:, 3] = torch.tensor([0.5, 0.25, 0.125, 1.0]).log()
    features_KF[:, 4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    draft = replace(verdict.proposal.draft, features_KF=features_KF)
    raw = {1: RawValues(0.25, 0.5, 1.5)}
    first, second, third = decisions_of(replace(verdict, proposal=replace(verdict.proposal, draft=draft), raw=raw))
    assert (first.drafter_raw_probability, first.drafter_raw_entropy) == (pytest.approx(0.125), 1.0), "of both pieces"
    assert (second.drafter_raw_probability, second.drafter_raw_entropy) == (pytest.approx(0.125), 3.0)
    assert (third.drafter_raw_probability, third.drafter_raw_entropy) == (1.0, 4.0)
    assert (second.target_raw_probability, second.emitted_raw_probability, second.target_raw_entropy) == raw[1]
    for other in (first, third):
        assert (other.target_raw_probability, other.emitted_raw_probability, other.target_raw_entropy) == (None,) * 3


def test_what_came_after_a_rejection_emits_nothing():
    third = decisions_of(rejected_verdict())[2]
    assert third.outcome is Outcome.UNJUDGED
    assert (third.emitted_id, third.emitted_bytes, third.origin, third.uniform) == (None, None, None, None)
    assert third.proposed_id == 10


def test_a_bonus_was_proposed_by_nobody():
    row = row_with((13,))
    verdict = Verdict(
        Proposal(draft_of(row, ()), ()),
        (Decision(0, None, Outcome.UNDRAFTED, 13, Origin.BONUS, uniform=0.5),),
        (13,),
        judged=0,
        accepted=0,
    )
    (bonus,) = decisions_of(verdict)
    assert (bonus.pieces, bonus.translation, bonus.proposed_id) == ((), Translation.NONE, None)
    assert (bonus.head_estimate, bonus.entropy) == (None, None)
    assert (bonus.emitted_id, bonus.emitted_bytes) == (13, None), "a special token has no bytes"
    assert bonus.position == 2


def test_pieces_after_the_end_of_translation_are_one_row():
    row = row_with((10,))
    token = ProposedToken(10, 0, 1, ())
    verdict = Verdict(
        Proposal(draft_of(row, (20, 21, 22)), (token,)), (accept(0, token, 10),), (10,), judged=1, accepted=1
    )
    _, dropped = decisions_of(verdict)
    assert (dropped.pieces, dropped.outcome, dropped.index) == ((21, 22), Outcome.UNTRANSLATABLE, 1)
    assert (dropped.proposed_id, dropped.emitted_id, dropped.uniform) == (None, None, None)
    assert dropped.entropy == 1.0, "of its first piece"
    assert dropped.head_estimate == pytest.approx(0.9**3)


def test_a_block_counts_what_its_decisions_show():
    verdict = rejected_verdict()
    block = RECORDER.record_block(verdict, 3, Seconds(0.1, 0.2, 0.3))
    assert block == BlockDone(
        offset=7,
        dataset="docs",
        block=2,
        rows=3,
        drafted=4,
        proposed=3,
        judged=2,
        accepted=1,
        emitted=2,
        seconds_decode=0.1,
        seconds_translate=0.2,
        seconds_verify=0.3,
    )


def test_a_prompt_adds_up_its_blocks():
    first, second = rejected_verdict(), rejected_verdict()
    counters = PromptCounters(started=1.5)
    counters.add(first)
    counters.add(second)
    row = row_with((10, 12))
    completed = RECORDER.record_completion(row, counters, 2.5, VERSIONS)
    assert (completed.blocks, completed.drafted, completed.judged, completed.accepted) == (2, 8, 4, 2)
    assert (completed.prompt_tokens, completed.emitted) == (3, 4)
    assert (completed.prompt_text, completed.completion_text) == ("a b", "10+11+10+12")
    assert (completed.started, completed.finished, completed.finish) == (1.5, 2.5, "length")
    assert completed.drafter_version == 4


def copied_verdict() -> Verdict:
    """The rejected verdict, had its draft been copied from the text."""
    verdict = rejected_verdict()
    drafted = verdict.proposal.draft
    copied = Draft(drafted.row, drafted.pieces, drafted.draft_probs_KD, (0.0,) * 4, None, (), DraftSource.LOOKUP)
    return Verdict(Proposal(copied, verdict.proposal.tokens), verdict.decisions, verdict.emitted, 2, 1)


def test_every_row_records_the_source_of_its_block():
    assert {decision.drafter for decision in decisions_of(rejected_verdict())} == {DraftSource.MODEL}
    assert {decision.drafter for decision in decisions_of(copied_verdict())} == {DraftSource.LOOKUP}
    assert RECORDER.record_block(copied_verdict(), 3, Seconds(0.1, 0.2, 0.3)).drafter is DraftSource.LOOKUP
    assert {decision.head_estimate for decision in decisions_of(copied_verdict())} == {None}


def test_what_was_looked_up_is_counted_apart():
    counters, verdict = PromptCounters(started=1.0), rejected_verdict()
    for each in (verdict, copied_verdict(), copied_verdict()):
        counters.add(each)
    event = RECORDER.record_completion(verdict.proposal.draft.row, counters, 2.0, VERSIONS)
    assert event.blocks == 3
    assert (event.drafted, event.judged, event.accepted) == (4, 2, 1)
    assert (event.lookup_blocks, event.lookup_drafted, event.lookup_judged, event.lookup_accepted) == (2, 8, 4, 2)


TREE = TokenTree(
    (
        Candidate(10, -1, 0, 0.75, DraftSource.LOOKUP, context=9, count=1),
        Candidate(11, 0, 1, 0.5, DraftSource.MEMORY, context=3, count=4),
        Candidate(12, 0, 1, 0.25, DraftSource.MEMORY, context=3, count=2),
        Candidate(11, -1, 0, 0.125, DraftSource.MEMORY, context=2, count=1),
    )
)


def judge(index: int, outcome: Outcome, emitted: int | None = None, origin: Origin | None = None) -> Decision:
    levels = {"drafter_levels": (1.0,), "target_levels": (0.25,), "uniform": 0.5}
    return Decision(index, None, outcome, emitted, origin, **levels, candidate=TREE.candidates[index])


def accepted_tree() -> Verdict:
    """The first candidate and its second child are accepted, and a bonus follows; their tokens are in the row."""
    decisions = (
        judge(0, Outcome.ACCEPTED, 10, Origin.ACCEPTED),
        judge(1, Outcome.ALTERNATIVE),
        judge(2, Outcome.ACCEPTED, 12, Origin.ACCEPTED),
        judge(3, Outcome.ALTERNATIVE),
        Decision(4, None, Outcome.UNDRAFTED, 13, Origin.BONUS),
    )
    row = row_with((10, 12, 13))
    draft = Draft(row, (), torch.ones(0, 1), (), None, (), DraftSource.LOOKUP, TREE, 2.5, 0.125)
    return Verdict(Proposal(draft, ()), decisions, (10, 12, 13), judged=2, accepted=2)


def test_a_candidate_of_a_tree():
    events = decisions_of(accepted_tree())
    third = events[2]
    assert (third.pieces, third.translation, third.outcome) == ((), Translation.NONE, Outcome.ACCEPTED)
    assert (third.proposed_id, third.proposed_bytes, third.emitted_id) == (12, b"\xe2\x82", 12)
    assert (third.drafter_levels, third.target_levels, third.uniform) == ((1.0,), (0.25,), 0.5)
    assert (third.parent, third.context, third.count, third.chance) == (0, 3, 2, 0.25)
    assert (third.entropy, third.head_estimate) == (None, None)
    assert [event.index for event in events] == [0, 1, 2, 3, 4]
    assert [event.position - 2 for event in events] == [0, 1, 1, 0, 2], "places on the path, not in the block"
    assert [event.parent for event in events] == [-1, 0, 0, -1, None]
    assert [str(event.drafter) for event in events] == ["lookup", "memory", "memory", "memory", "lookup"]
    bonus = events[4]
    assert (bonus.proposed_id, bonus.emitted_id, bonus.origin) == (None, 13, Origin.BONUS)
    assert (bonus.context, bonus.count, bonus.chance) == (None, None, None)


def test_the_block_of_a_tree_counts_candidates_and_has_its_prediction():
    done = RECORDER.record_block(accepted_tree(), 3, Seconds(0.1, 0.2, 0.3))
    assert (done.drafted, done.proposed, done.candidates) == (4, 4, 4)
    assert (done.judged, done.accepted, done.emitted) == (2, 2, 3)
    assert (done.drafter, done.expected_tokens, done.expected_seconds) == (DraftSource.LOOKUP, 2.5, 0.125)
    counters = PromptCounters(started=1.0)
    counters.add(accepted_tree())
    assert (counters.blocks, counters.drafted, counters.judged) == (1, 0, 0)
    found = (counters.lookup_blocks, counters.lookup_drafted, counters.lookup_judged, counters.lookup_accepted)
    assert (*found, counters.own_accepted) == (1, 4, 2, 2, 1)


def test_without_text_the_ids_stay_and_nothing_else_that_can_be_read():
    recorder = Recorder("big", WORDS.__getitem__, lambda tokens: "+".join(map(str, tokens)), text=False)
    verdict = rejected_verdict()
    kept, full = list(recorder.record_decisions(verdict, VERSIONS)), decisions_of(verdict)
    assert [(one.proposed_id, one.emitted_id, one.pieces) for one in kept] == [
        (one.proposed_id, one.emitted_id, one.pieces) for one in full
    ]
    assert {(one.proposed_bytes, one.emitted_bytes) for one in kept} == {(None, None)}
    assert any(one.proposed_bytes for one in full)
    row = verdict.proposal.draft.row
    done = recorder.record_completion(row, PromptCounters(0.0), 1.0, VERSIONS)
    assert (done.prompt_text, done.completion_text, done.emitted) == ("", "", row.emitted)


def test_without_decisions_a_block_has_an_event_and_its_tokens_have_none():
    recorder = Recorder("big", WORDS.__getitem__, lambda tokens: "", decisions=False)
    verdict = rejected_verdict()
    assert list(recorder.record_decisions(verdict, VERSIONS)) == []
    assert recorder.record_block(verdict, 1, Seconds(0.1, 0.2, 0.3)).emitted == len(verdict.emitted)


@pytest.mark.parametrize("got", ["'my secret'", "'a, got b'"])
def test_a_rejection_without_text_does_not_quote_the_row(got):
    event = PromptRejected("docs", 3, f"the prompt in 'text' must be text, got {got}")
    assert without_text(event) == PromptRejected("docs", 3, "the prompt in 'text' must be text")
    plain = PromptRejected("docs", 4, "the prompt must not be empty")
    assert without_text(plain) == plain
