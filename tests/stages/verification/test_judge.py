"""Judging the output of another engine: the decisions are those of our verification with one-hot drafts."""

import random
from dataclasses import replace

import pytest
import torch

from stages.contract.blocks import Candidate, Draft, Proposal, SequenceState, TokenTree
from stages.learn.examples.top_distributions import TopDistributions
from stages.ngrams.trie import Trie
from stages.sampling.drawing import RowDistributions
from stages.sampling.random_source import SeededRandomSource
from stages.verification.chain_decisions import decide
from stages.verification.emitted_tokens import emitted_tokens
from stages.verification.judge import Judge, PassResult
from stages.verification.parsing import parse
from stages.verification.rules import TrieRule, one_hot_probs
from store.events import DraftSource, Outcome

PIECES = ((0,), (0, 1), (2,), (1,), (2, 0, 1), (0, 1, 2))  # of target tokens 0, 1, ...; 5 is no active token
ACTIVE = 5
END = 3


def make_trie() -> Trie:
    trie = Trie(target_size=len(PIECES), drafter_size=3)
    trie.insert_all([(pieces, token) for token, pieces in enumerate(PIECES[:ACTIVE])])
    return trie


def make_row(seed: int) -> SequenceState:
    return SequenceState(0, "id", "d", "", [2], 1, [2], SeededRandomSource(seed, 0), remaining_tokens=50)


def to_top(logits_NV: torch.Tensor, count: int) -> TopDistributions:
    values_NK, ids_NK = logits_NV.topk(count)
    sums_N1 = (logits_NV - values_NK[:, :1]).exp().sum(-1, keepdim=True)
    return TopDistributions(*(one.numpy() for one in (ids_NK, values_NK, logits_NV.logsumexp(-1), sums_N1)))


@pytest.mark.parametrize("seed", range(60))
def test_decisions_are_those_of_our_own_verification(seed: int):
    numbers, trie, row = random.Random(seed), make_trie(), make_row(seed)
    pieces = tuple(numbers.randrange(3) for _ in range(numbers.randrange(1, 6)))
    draft = Draft(row, pieces, torch.full((len(pieces), 3), 1 / 3), (0.0,) * len(pieces), None, ())
    proposal = Proposal(draft, parse(trie, pieces))
    logits_MV = (
        torch.randn(len(proposal.verifiable) + 1, len(PIECES), generator=torch.Generator().manual_seed(seed)) * 2
    )
    rule, probs_MV = TrieRule(trie, one_hot_probs), logits_MV.softmax(-1)
    (levels,) = rule.levels([proposal], probs_MV, [0])
    ours = decide(proposal, levels, RowDistributions(probs_MV), rule, row.rng)
    judge = Judge([], PIECES, rule)
    judge.results[row] = PassResult(emitted_tokens(ours), to_top(logits_MV, len(PIECES)))
    (verdict,) = judge([proposal])
    for mine, theirs in zip(ours, verdict.decisions, strict=True):
        exact = {"drafter_levels": (), "target_levels": (), "uniform": None}
        assert replace(theirs, **exact) == replace(mine, **exact)
        assert theirs.drafter_levels == mine.drafter_levels
        assert theirs.target_levels == pytest.approx(mine.target_levels, abs=1e-6)
    assert row.tokens == [2, *emitted_tokens(ours)]
    assert row.pieces == [2, *(piece for token in emitted_tokens(ours) for piece in PIECES[token])]
    assert verdict.judged == sum(one.outcome in (Outcome.ACCEPTED, Outcome.REJECTED) for one in ours)


def make_chain(row: SequenceState, *tokens: int) -> Proposal:
    options = (Candidate(token, place - 1, place, 0.5, DraftSource.MEMORY, 2, 1) for place, token in enumerate(tokens))
    return Proposal(Draft.from_tree(row, TokenTree(tuple(options)), 2.0), ())


def judge_chain(emitted: tuple[int, ...], top: TopDistributions | None = None):
    row, judge = make_row(0), Judge([END])
    judge.results[row] = PassResult(emitted, top)
    (verdict,) = judge([make_chain(row, 1, 2, 4)])
    return row, verdict


def test_what_follows_the_end_is_no_part_of_the_text():
    row, verdict = judge_chain((1, END, 5))
    assert (row.tokens, row.finish, verdict.emitted) == ([2, 1, END], "stop", (1, END))
    row, verdict = judge_chain((1, 2, 4, 0))
    assert (row.finish, verdict.accepted, verdict.decisions[-1].outcome) == ("", 3, Outcome.UNDRAFTED)


def test_probabilities_are_known_of_the_likeliest_tokens_alone():
    logits_MV = torch.tensor([[0.0, 9.0, 1.0, 0.0, 0.0], [0.0, 1.0, 2.0, 9.0, 5.0], [0.0] * 5, [0.0] * 5])
    _, verdict = judge_chain((1, 2, 0), to_top(logits_MV, 2))
    first, second, _ = verdict.decisions
    assert first.target_levels == pytest.approx((float(logits_MV[0].softmax(-1)[1]),))
    assert second.target_levels == second.drafter_levels == (), "token 2 is the third"
    assert verdict.raw == {2: (pytest.approx(0.2), None, None)}
    _, verdict = judge_chain((1, 4), to_top(logits_MV, 2))
    assert verdict.raw == {1: (None, pytest.approx(float(logits_MV[1].softmax(-1)[4])), None)}
    _, verdict = judge_chain((1, 2, 0), to_top(logits_MV[:3], 2))
    assert {one.target_levels for one in verdict.decisions} == {()}, "the engine read a shorter draft"
