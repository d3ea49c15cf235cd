"""Training data of a block for the head: one label per judged piece, and the positions of accepted n-grams."""

from dataclasses import replace

import pytest
import torch
from doubles import row_of
from soft_target_tables import compute_all, store_tokens
from stored_states import store

from stages.contract.blocks import (
    Decision,
    Draft,
    Proposal,
    SequenceState,
    TopTokens,
    Verdict,
)
from stages.learn.examples.builder import ExampleBuilder, make_labels
from stages.ngrams.trie import Trie
from stages.verification.parsing import parse
from store.events import DraftSource, Origin, Outcome

SPELLING = ((0,), (1,), (0, 1), (0, 1, 2), (2,))
Levels = tuple[tuple[float, ...], tuple[float, ...]]


def proposal_of(pieces: tuple[int, ...], row: SequenceState | None = None, *, features: bool = True) -> Proposal:
    trie = Trie(len(SPELLING), 4)
    trie.insert_all((spelt, token) for token, spelt in enumerate(SPELLING))
    features_KF = torch.arange(len(pieces)).float()[:, None] if features and pieces else None
    draft = Draft(row or row_of([0]), pieces, torch.zeros(len(pieces), 4), (), features_KF, ())
    return Proposal(draft, parse(trie, pieces))


def accept(proposal: Proposal, index: int, levels: Levels) -> Decision:
    proposed = proposal.tokens[index]
    return Decision(
        index, proposed, Outcome.ACCEPTED, proposed.token, Origin.ACCEPTED, *levels, 0.0, len(proposed.tests)
    )


def reject(proposal: Proposal, index: int, levels: Levels, passed: int) -> Decision:
    return Decision(index, proposal.tokens[index], Outcome.REJECTED, 4, Origin.RESIDUAL, *levels, 0.9, passed)


def bonus(index: int) -> Decision:
    return Decision(index, None, Outcome.UNDRAFTED, 1, Origin.BONUS)


def verdict_of(proposal: Proposal, *decisions: Decision, soft_targets: TopTokens | None = None) -> Verdict:
    judged = sum(decision.outcome in (Outcome.ACCEPTED, Outcome.REJECTED) for decision in decisions)
    return Verdict(proposal, decisions, (), judged, 0, soft_targets)


def labels(verdict: Verdict) -> dict[int, float]:
    return {int(label.features_F[0]): pytest.approx(label.acceptance) for label in make_labels(verdict)}


def test_a_piece_is_labelled_with_the_chance_of_the_tests_that_it_decided():
    """Pieces 0 1 then 1: the n-gram (0, 1) is stopped at by the third piece, which then begins its own token."""
    proposal = proposal_of((0, 1, 1))
    first = accept(proposal, 0, ((0.5, 0.8, 0.5), (0.4, 0.9, 0.25)))
    second = accept(proposal, 1, ((0.5,), (0.3,)))
    assert labels(verdict_of(proposal, first, second, bonus(2))) == {0: 0.8, 1: 1.0, 2: 0.5 * 0.6}


def test_only_judged_tests_count():
    proposal = proposal_of((0, 1, 1, 0))
    unjudged = Decision(1, proposal.tokens[1], Outcome.UNJUDGED, None, None, (0.1,), (0.1,))
    levels = ((0.5, 0.8, 0.5), (0.4, 0.2, 0.5))
    assert labels(verdict_of(proposal, reject(proposal, 0, levels, passed=0), unjudged)) == {0: 0.8}
    assert labels(verdict_of(proposal, reject(proposal, 0, levels, passed=1), unjudged)) == {0: 0.8, 1: 0.25}


def tokens_at(*places: tuple[int, int]) -> TopTokens:
    """One stored token at each position: itself, with so many pieces."""
    return store_tokens(*((position, {tuple(range(levels)): 0.9}) for position, levels in places))


def test_a_builder_joins_blocks_into_an_example():
    row = row_of([0, 1], [0, 1, 0], offset=7)
    builder = ExampleBuilder()
    first = proposal_of((0, 1, 1), row)
    one = ((0.5, 0.8, 0.5), (0.5, 0.8, 0.5))
    blocks = tokens_at((3, 2), (5, 1), (6, 1)), tokens_at((7, 3))
    decisions = accept(first, 0, one), accept(first, 1, ((0.5,), (0.5,))), bonus(2)
    builder.add_verdict(verdict_of(first, *decisions, soft_targets=blocks[0]))
    row.pieces += [0, 1, 1, 1]
    second = proposal_of((0,), row)
    refused = reject(second, 0, ((0.5, 1.0), (0.1, 1.0)), 0)
    builder.add_verdict(verdict_of(second, refused, soft_targets=blocks[1]))
    example = builder.build(row, "big")
    assert (example.offset, example.target, example.pieces) == (7, "big", (0, 1, 0, 0, 1, 1, 1))
    assert example.judged == 3
    assert example.soft_targets.positions.tolist() == [3, 5, 6, 7]
    found = compute_all(example.soft_targets)
    assert found == compute_all(blocks[0]) + compute_all(blocks[1])
    assert [(one.position, one.depth) for one in found] == [(3, 0), (4, 1), (5, 0), (6, 0), (7, 0), (8, 1), (9, 2)]
    assert len(example.labels) == 4
    assert tuple(example.ngram_positions) == (3, 4), "the pieces of the accepted n-gram"


def test_a_builder_that_was_saved_continues_with_what_was_stored():
    row, builder = row_of([0, 1], [0, 1, 0], offset=7), ExampleBuilder()
    builder.add_verdict(verdict_of(proposal_of((), row), bonus(0), soft_targets=tokens_at((3, 2))))
    state = store(builder.state_dict(row))
    again = ExampleBuilder.from_state(state)
    for each in (builder, again):
        each.add_verdict(verdict_of(proposal_of((), row), bonus(0), soft_targets=tokens_at((5, 1))))
    one, other = (each.build(row, "big") for each in (builder, again))
    assert compute_all(one.soft_targets) == compute_all(other.soft_targets)


@pytest.mark.constants(part_tokens=2, part_context=3)
def test_a_long_answer_becomes_several_examples_that_begin_a_little_before_it():
    row, builder, parts = row_of([0, 1], [0, 1, 0], offset=7), ExampleBuilder(), []
    for position in range(3, 8):
        row.pieces.append(1)
        builder.add_verdict(verdict_of(proposal_of((), row), bonus(0), soft_targets=tokens_at((position, 1))))
        builder = ExampleBuilder.from_state(store(builder.state_dict(row)))
        if builder.is_part:
            parts.append(builder.build(row, "big"))
            builder = ExampleBuilder.after(row)
    parts.append(builder.build(row, "big"))
    texts = [(0, 1, 0, 1, 1), (0, 1, 1, 1, 1), (1, 1, 1, 1)]
    assert [part.pieces for part in parts] == texts
    assert [part.soft_targets.positions.tolist() for part in parts] == [[3, 4], [3, 4], [3]]
    assert {part.offset for part in parts} == {7}


@pytest.mark.parametrize(
    ("source", "judged"), [(DraftSource.MODEL, 1), (DraftSource.LOOKUP, 0), (DraftSource.MEMORY, 0)]
)
def test_gains_are_counted_where_the_model_drafted(source: DraftSource, judged: int):
    """A draft of another source does not judge the drafter; a block without a draft judges nothing."""
    proposal, builder = proposal_of((0,)), ExampleBuilder()
    proposal = replace(proposal, draft=replace(proposal.draft, source=source))
    builder.add_verdict(verdict_of(proposal, accept(proposal, 0, ((0.5, 1.0), (0.5, 1.0))), bonus(1)))
    builder.add_verdict(verdict_of(proposal_of(()), bonus(0)))
    assert builder.build(row_of([0]), "big").judged == judged
