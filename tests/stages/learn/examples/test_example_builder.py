"""Training data of a block for the head: one label per judged piece, and the positions of accepted n-grams."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles import row_of
from soft_target_tables import compute_all
from stored_states import store

from stages.contract.blocks import (
    Decision,
    Draft,
    OffPolicySpan,
    Proposal,
    SequenceState,
    SoftTarget,
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


def verdict_of(
    proposal: Proposal,
    *decisions: Decision,
    soft_targets: tuple[SoftTarget | TopTokens, ...] = (),
    branch: OffPolicySpan | None = None,
) -> Verdict:
    judged = sum(decision.outcome in (Outcome.ACCEPTED, Outcome.REJECTED) for decision in decisions)
    return Verdict(proposal, decisions, (), judged, 0, soft_targets, branch)


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


def soft_targets_at(*places: tuple[int, int]) -> tuple[SoftTarget, ...]:
    return tuple(SoftTarget(position, depth, (0,), (0.9,), (0.9,), 0.1) for position, depth in places)


def test_a_builder_joins_blocks_into_an_example():
    row = row_of([0, 1], [0, 1, 0], offset=7)
    builder = ExampleBuilder()
    first = proposal_of((0, 1, 1), row)
    one = ((0.5, 0.8, 0.5), (0.5, 0.8, 0.5))
    soft_targets = soft_targets_at((3, 0), (4, 1), (5, 0), (6, 0))
    decisions = accept(first, 0, one), accept(first, 1, ((0.5,), (0.5,))), bonus(2)
    builder.add_verdict(verdict_of(first, *decisions, soft_targets=soft_targets))
    row.pieces += [0, 1, 1, 1]
    second = proposal_of((0,), row)
    later = soft_targets_at((7, 0))
    branch = OffPolicySpan(7, (0, 2), soft_targets_at((8, 0)))
    refused = reject(second, 0, ((0.5, 1.0), (0.1, 1.0)), 0)
    builder.add_verdict(verdict_of(second, refused, soft_targets=later, branch=branch))
    example = builder.build(row, "big")
    assert (example.offset, example.target, example.pieces) == (7, "big", (0, 1, 0, 0, 1, 1, 1))
    assert (example.judged, example.branches) == (3, (branch,)), "blocks without a branch add none"
    assert example.soft_targets == soft_targets + later
    assert len(example.labels) == 4
    assert tuple(example.ngram_positions) == (3, 4), "the pieces of the accepted n-gram"


def top_tokens_at(*places: tuple[int, int]) -> TopTokens:
    """One stored token at each position: itself, with so many pieces."""
    positions, levels = (np.array(column) for column in zip(*places, strict=True))
    lengths = levels[:, None]
    return TopTokens(
        positions, levels, 0 * levels, np.full(lengths.shape, 0.9, np.float32), lengths, np.arange(levels.sum())
    )


def test_what_blocks_store_becomes_one_object_with_the_same_soft_targets():
    row, builder = row_of([0, 1], [0, 1, 0], offset=7), ExampleBuilder()
    first, second = proposal_of((0, 1, 1), row), proposal_of((), row)
    decisions = accept(first, 0, ((0.5, 0.8, 0.5), (0.5, 0.8, 0.5))), accept(first, 1, ((0.5,), (0.5,))), bonus(2)
    blocks = [(top_tokens_at((3, 2), (5, 1), (6, 1)),), (top_tokens_at((7, 3)),)]
    builder.add_verdict(verdict_of(first, *decisions, soft_targets=blocks[0]))
    builder.add_verdict(verdict_of(second, bonus(0), soft_targets=blocks[1]))
    example = builder.build(row, "big")
    (stored,) = example.soft_targets
    assert stored.positions.tolist() == [3, 5, 6, 7]
    found = compute_all(example.soft_targets)
    assert found == compute_all(blocks[0]) + compute_all(blocks[1])
    assert [(one.position, one.depth) for one in found] == [(3, 0), (4, 1), (5, 0), (6, 0), (7, 0), (8, 1), (9, 2)]
    assert tuple(example.ngram_positions) == (3, 4), "the pieces of the accepted n-gram"


def test_a_builder_that_was_saved_continues_with_what_was_stored():
    row, builder = row_of([0, 1], [0, 1, 0], offset=7), ExampleBuilder()
    builder.add_verdict(verdict_of(proposal_of((), row), bonus(0), soft_targets=(top_tokens_at((3, 2)),)))
    state = store(builder.state_dict(row))
    again = ExampleBuilder.from_state(state)
    for each in (builder, again):
        each.add_verdict(verdict_of(proposal_of((), row), bonus(0), soft_targets=(top_tokens_at((5, 1)),)))
    one, other = (each.build(row, "big") for each in (builder, again))
    assert len(other.soft_targets) == 1
    assert compute_all(one.soft_targets) == compute_all(other.soft_targets)


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
