"""Verification of a block: what is appended to the row, what is counted, and where it ends."""

import math
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from doubles import TableModel, _hidden_state, row_of
from hypothesis import given
from hypothesis import strategies as st
from token_trees import Branches, make_tree, tree_proposals
from torch import Tensor

from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.ngrams.trie import Trie
from stages.sampling.drawing import RowDistributions
from stages.sampling.params import SamplingParams
from stages.sampling.transforms import LogitBias
from stages.verification.chain_decisions import _outcome_distribution, passed_levels
from stages.verification.emitted_tokens import accepted_path, emitting_lines, truncate
from stages.verification.parsing import parse
from stages.verification.rules import TrieRule
from stages.verification.tree_decisions import chosen_candidate, decide_tree, place_distribution
from stages.verify import Verify
from stages.vocabulary.text_stream import StopStrings
from store.errors import ModelError
from store.events import Origin, Outcome

SPELLING = ((0,), (1,), (0, 1), (2,), None, (3,))
DIRECT = ((0,), (1,), None, (2,), None, (3,))  # without the n-gram
END = 5
CONTEXT = tuple(pieces or () for pieces in SPELLING)


def counts_up(history: tuple[int, ...]) -> Tensor:
    """Greedy, the target emits the number after the last one; of ids beyond the tokenizer it would give others."""
    logits = torch.zeros(8)
    logits[(history[-1] + 1) % 6] = 5.0
    logits[6:] = 99.0
    return logits


def new_verify(rows: Sequence[SequenceState], model: TableModel, teach=None, trie: Trie | None = None, **options):
    """The stage, with these rows."""
    verify = Verify(model, TrieRule(trie or Trie(8, 4)), SamplingParams(), CONTEXT, 6, {END}, teach, **options)
    for row in rows:
        verify.admit(row)
    return verify


def make_trie(spellings: tuple) -> Trie:
    trie = Trie(8, 4)
    trie.insert_all((spelt, token) for token, spelt in enumerate(spellings) if spelt)
    return trie


def verify_block(
    row: SequenceState,
    pieces: tuple[int, ...],
    *,
    logits=counts_up,
    drafted: float = 1.0,
    trie_of: tuple = SPELLING,
) -> tuple[Verdict, TableModel]:
    trie, model = make_trie(trie_of), TableModel(logits, 8)
    verify = new_verify([row], model, trie=trie)
    draft_probs_KD = drafted * torch.eye(4)[list(pieces)] if pieces else torch.zeros(0, 4)
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


LETTERS = dict(enumerate([b"a", b"b", b"c", b"d", b"e"]))  # the end is no text


def stopping_row(tokens: list[int], *stops: str, remaining_tokens: int = 99) -> SequenceState:
    row = row_of(tokens, remaining_tokens=remaining_tokens)
    row.stop_strings = StopStrings(LETTERS.get, stops)
    return row


def test_a_stop_string_ends_the_block_with_the_token_that_completes_it():
    row = stopping_row([0], "bc")
    verdict, model = verify_block(row, (1, 0, 1, 2, 1))  # tokens 1, 2, 3 and 1, which would be rejected
    assert outcomes(verdict) == [(Outcome.ACCEPTED, token, Origin.ACCEPTED) for token in (1, 2)]
    assert (verdict.emitted, verdict.judged, verdict.accepted) == ((1, 2), 2, 2)
    assert (row.tokens, row.finish, row.remaining_tokens) == ([0, 1, 2], "stop", 97)
    assert model.length(row) == 2


def test_a_stop_string_may_begin_in_an_earlier_block_but_not_in_the_prompt():
    row, finishes = stopping_row([0], "ab", "bcd"), []
    verify = new_verify([row], TableModel(counts_up, 8))
    while not row.finish:
        verify([Proposal(Draft(row, (), torch.zeros(0, 4), (), None, ()), ())])
        finishes.append(row.finish)
    assert (row.tokens, finishes) == ([0, 1, 2, 3], ["", "", "stop"])


def test_a_row_has_the_targets_state_that_its_last_token_was_drawn_from():
    model, projected = TableModel(counts_up, 8), []

    def project(hidden_NW: Tensor) -> Tensor:
        projected.append(hidden_NW)
        return torch.arange(len(hidden_NW))[:, None]

    trie, rows = make_trie(SPELLING), [row_of([0]), row_of([4], offset=1)]
    verify = new_verify(rows, model, trie=trie, project=project)
    drafts = [Draft(row, (1,), torch.eye(4)[[1]], (), None, ()) for row in rows]
    verdicts = verify([Proposal(draft, parse(trie, draft.pieces)) for draft in drafts])
    assert [len(verdict.emitted) for verdict in verdicts] == [2, 1], "the second row rejects its draft"
    assert [verdict.states.flatten().tolist() for verdict in verdicts] == [[0, 1], [2]]
    assert [row.target_state.tolist() for row in rows] == [[1], [2]]
    states_NW = [_hidden_state(history, 4) for history in ((0,), (0, 1), (4,))]
    torch.testing.assert_close(projected[0], torch.stack(states_NW))


def entropy_of(logits_V: Tensor) -> float:
    return float(torch.special.entr(logits_V[:6].double().softmax(-1)).sum())


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.01, top_k=1)])
def test_a_rejected_token_has_its_probability_before_sampling(sampling: SamplingParams):
    row = row_of([0])
    row.sampling, row.transforms = sampling, (LogitBias([(4, -3.0)]),)
    verdict, _ = verify_block(row, (1, 0, 1, 2, 1))  # tokens 1, 2, 3, 1; the target emits 4 instead of the last
    assert list(verdict.raw) == [3], "accepted tokens have none"
    want_V = torch.tensor([0.0, 0, 0, 0, 5, 0]).softmax(-1)
    assert verdict.raw[3] == pytest.approx((float(want_V[1]), float(want_V[4]), entropy_of(counts_up((3,)))), rel=1e-5)


def test_pieces_that_name_no_token_are_rejected_without_a_probability():
    verdict, _ = verify_block(row_of([0]), (0, 3), trie_of=(None, (1,), None, (2,), None, (3,)))
    ((_, (proposed, emitted, _)),) = verdict.raw.items()
    assert (proposed, emitted) == (None, pytest.approx(float(torch.tensor([0.0, 5, 0, 0, 0, 0]).softmax(-1)[1])))


@pytest.mark.parametrize(
    ("uniform", "passed"), [(0.0, 3), (0.0999, 3), (0.1, 2), (0.2, 1), (0.4999, 1), (0.5, 0), (0.999, 0)]
)
def test_one_number_passes_as_many_levels_as_the_products_allow(uniform: float, passed: int):
    assert passed_levels(((0.5, 0.5, 0.5), (0.25, 0.2, 0.25)), uniform) == passed  # products 0.5, 0.2, 0.1


def test_a_level_that_the_target_has_no_number_for_is_never_passed():
    assert passed_levels(((0.5,), (math.nan,)), 0.0) == 0
    assert _outcome_distribution(((0.5,), (math.nan,))) == [0.0, 1.0]


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

    def logits_after_3(history: tuple[int, ...]) -> Tensor:
        return counts_up(history) if history[-1] != 3 else torch.full((8,), wrong)

    row = row_of([0], offset=4)
    with pytest.raises(ModelError, match=r"logits must be finite, got NaN or infinity for prompt prompt:4 after 1 "):
        verify_block(row, pieces, logits=logits)
    assert row.tokens == [0]
    with pytest.raises(ModelError, match="prompt:0 after 1 "):
        verify_tree(row_of([0]), {1: {}, 3: {}}, logits=logits_after_3)


def test_nothing_is_computed_for_rows_that_give_no_example():
    seen = []

    def teach(batch, outcomes, logits_NV, starts):
        seen.append(([proposal.draft.row.offset for proposal in batch], list(starts)))
        return [proposal.draft.row.offset for proposal in batch]

    rows = [row_of([0], offset=number) for number in range(4)]
    rows[0].record_example, rows[2].private = False, True
    verify = new_verify(rows, TableModel(counts_up, 8), teach)
    proposals = [Proposal(Draft(row, (), torch.zeros(0, 4), (), None, ()), ()) for row in rows]
    verdicts = verify(proposals)
    assert seen == [([1, 3], [1, 3])]
    assert [verdict.soft_targets for verdict in verdicts] == [None, 1, None, 3]


# Trees of target tokens.


def verify_tree(
    row: SequenceState, branches: Branches, *, logits=counts_up, unread: int = 1
) -> tuple[Verdict, TableModel]:
    """A block with a tree. So many tokens of the row are read in its pass."""
    model = TableModel(logits, 8)
    verify = new_verify([row], model)
    model.roll_back(row, len(row.tokens) - unread)
    (verdict,) = verify(tree_proposals([row], [make_tree(branches) if branches else None], 4))
    return verdict, model


@pytest.mark.parametrize("unread", [1, 2, 3])
def test_the_path_that_the_target_would_emit_is_accepted(unread: int):
    row = row_of([3, 4, 0], [2, 1, 0])
    verdict, model = verify_tree(row, {2: {3: {}}, 1: {4: {}, 2: {0: {}, 3: {}}}, 3: {}}, unread=unread)
    assert outcomes(verdict) == [
        (Outcome.ALTERNATIVE, None, None),  # 2
        (Outcome.UNJUDGED, None, None),
        (Outcome.ACCEPTED, 1, Origin.ACCEPTED),
        (Outcome.ALTERNATIVE, None, None),  # 4 after 1
        (Outcome.ACCEPTED, 2, Origin.ACCEPTED),
        (Outcome.ALTERNATIVE, None, None),  # 0 after 2
        (Outcome.ACCEPTED, 3, Origin.ACCEPTED),
        (Outcome.ALTERNATIVE, None, None),  # 3 after the text
        (Outcome.UNDRAFTED, 4, Origin.BONUS),
    ]
    assert (verdict.emitted, verdict.judged, verdict.accepted) == ((1, 2, 3, 4), 3, 3)
    assert (row.tokens, row.pieces) == ([3, 4, 0, 1, 2, 3, 4], [2, 1, 0, 1, 0, 1, 2])
    assert (row.remaining_tokens, row.block, row.finish) == (95, 1, "")
    assert model.tokens_read(row) == [3, 4, 0, 1, 2, 3], "the path is kept, and the bonus is read with the next block"


def test_a_place_without_the_target_s_token_ends_the_block():
    verdict, model = verify_tree(row := row_of([0]), {1: {4: {5: {}}, 3: {}}, 2: {}})
    assert outcomes(verdict) == [
        (Outcome.ACCEPTED, 1, Origin.ACCEPTED),
        (Outcome.REJECTED, 2, Origin.RESIDUAL),  # the first candidate of its place carries the rejection
        (Outcome.UNJUDGED, None, None),
        (Outcome.ALTERNATIVE, None, None),
        (Outcome.ALTERNATIVE, None, None),
    ]
    assert (verdict.emitted, verdict.judged, verdict.accepted) == ((1, 2), 2, 1)
    assert model.tokens_read(row) == [0, 1]


def test_a_rejected_candidate_has_the_target_s_own_probability_at_its_place():
    verdict, _ = verify_tree(row_of([0]), {2: {4: {}}, 1: {4: {5: {}}, 3: {}}})  # 2 instead of 4 after 1
    ((index, (proposed, emitted, entropy)),) = verdict.raw.items()
    assert verdict.decisions[index].outcome is Outcome.REJECTED
    logits_V = counts_up((1,))
    want_V = logits_V[:6].softmax(-1)
    assert (proposed, emitted) == pytest.approx((float(want_V[4]), float(want_V[2])))
    assert entropy == pytest.approx(entropy_of(logits_V), rel=1e-5)


def test_a_candidate_has_the_target_s_probability_and_the_number_of_its_place():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125, 0, 0, 0, 0]).log()
    row = row_of([0])
    row.sampling = SamplingParams(1.0)
    verdict, _ = verify_tree(row, {0: {1: {}, 2: {}}, 3: {0: {}}}, logits=lambda history: logits)
    assert [decision.index for decision in verdict.decisions] == list(range(len(verdict.decisions)))
    candidates = [decision for decision in verdict.decisions if decision.candidate]
    assert {decision.drafter_levels for decision in candidates} == {(1.0,)}
    for decision in candidates:
        assert decision.target_levels == (pytest.approx(float(logits.exp()[decision.candidate.token])),)
        assert decision.proposed is None
    by_place: dict[int, set] = {}
    for decision in candidates:
        by_place.setdefault(decision.candidate.parent, set()).add(decision.uniform)
    assert all(len(numbers) == 1 for numbers in by_place.values())
    assert None not in by_place[-1]


def test_a_chain_is_tested_as_pieces_of_probability_one():
    """The same numbers decide alike: without branches it is the test of `decide` with one-hot drafts."""
    logits = torch.tensor([1.0, 0.5, 0.2, 0.0, -1.0, -1.0, 9.0, 9.0])
    found: tuple[list[tuple], list[tuple]] = [], []
    for seed in range(40):
        for by_tree in (False, True):
            row = row_of([0], offset=seed)
            row.sampling = SamplingParams(1.0)
            if by_tree:
                verdict, _ = verify_tree(row, {0: {3: {1: {}}}}, logits=lambda history: logits)
            else:
                verdict, _ = verify_block(row, (0, 2, 1), logits=lambda history: logits, trie_of=DIRECT)
            found[by_tree].append((verdict.emitted, verdict.accepted, verdict.judged))
    assert found[0] == found[1]
    assert len(set(found[0])) > 5


CHAIN = {1: {2: {}}}


@pytest.mark.parametrize(
    ("trees", "tokens", "wanted", "parents"),
    [
        ([{2: {3: {}, 1: {}}, 1: {}}], [[0, 2, 3, 1, 1]], [5], [[-1, 0, 1, 1, 0]]),
        ([CHAIN, None, CHAIN], [[0, 1, 2], [0], [0, 1, 2]], [3, 1, 3], None),
        ([CHAIN, None, {1: {}, 2: {}}], [[0, 1, 2], [0], [0, 1, 2]], [3, 1, 3], [[-1, 0, 1], [-1], [-1, 0, 0]]),
    ],
)
def test_a_tree_has_a_line_of_logits_per_candidate_and_one_and_chains_no_parents(trees, tokens, wanted, parents):
    rows, seen = [row_of([0], offset=number) for number in range(len(trees))], []
    verify = new_verify(rows, model := TableModel(counts_up, 8))
    forward = model.forward
    model.forward = lambda *given, **options: seen.append((*given[1:], options)) or forward(*given, **options)
    verify(tree_proposals(rows, [tree and make_tree(tree) for tree in trees], 4))
    assert seen == [(tokens, wanted, {"parents": parents})]


def test_a_tree_is_cut_at_the_remaining_tokens_at_an_end_and_at_a_stop_string():
    deep = {2: {}, 1: {0: {}, 2: {3: {4: {}}}}}
    verdict, model = verify_tree(row := row_of([0], remaining_tokens=2), deep)
    assert (verdict.emitted, row.finish, row.remaining_tokens) == ((1, 2), "length", 0)
    assert [decision.emitted for decision in verdict.decisions] == [None, 1, None, 2], "what follows is dropped"
    assert model.tokens_read(row) == [0, 1]

    verdict, model = verify_tree(row := row_of([3]), {1: {}, 4: {END: {0: {}, 1: {}}}, 5: {}})
    assert (verdict.emitted, row.finish, row.tokens) == ((4, END), "stop", [3, 4, END])
    assert len(verdict.decisions) == 3
    assert model.tokens_read(row) == [3, 4]

    verdict, model = verify_tree(row := stopping_row([0], "bc"), deep)
    assert (verdict.emitted, row.finish, row.tokens) == ((1, 2), "stop", [0, 1, 2])
    assert row.stop_strings.complete
    assert model.tokens_read(row) == [0, 1]

    verdict, _ = verify_tree(row := stopping_row([0], "d"), {1: {3: {}, 4: {}}})
    assert (verdict.emitted, row.finish) == ((1, 2), ""), "a candidate that was not accepted completes nothing"


@pytest.mark.parametrize("branches", [{2: {3: {}}, 1: {4: {}, 2: {}}}, {1: {4: {}}}, {2: {}}, {1: {2: {3: {}}}}])
def test_log_probabilities_are_of_the_lines_that_tokens_were_drawn_from(branches: Branches):
    def logits(history: tuple[int, ...]) -> Tensor:
        return counts_up(history) + torch.arange(8) * (0.1 * sum(history))

    row = row_of([0])
    row.sampling = SamplingParams(logprobs=0)
    verdict, _ = verify_tree(row, branches, logits=logits)
    for place, one in enumerate(verdict.logprobs):
        wanted = logits((0, *verdict.emitted[:place]))[:6].log_softmax(0)[one.token]
        assert (one.token, one.logprob) == (verdict.emitted[place], pytest.approx(float(wanted), abs=1e-5))
    assert len(verdict.logprobs) == len(verdict.emitted)


def test_a_teacher_has_the_logits_of_the_emitted_tokens_in_order():
    """They are those of a draft that equals the emitted tokens, next to rows without trees."""
    seen = []

    def teach(batch, outcomes, logits_NV, starts):
        seen.append((logits_NV.argmax(-1).tolist(), list(starts)))
        return [None for _ in batch]

    rows = [row_of([0], offset=number) for number in range(4)]
    rows[3].private = True
    verify = new_verify(rows, TableModel(counts_up, 8), teach)
    tree, other = make_tree({2: {3: {}}, 1: {4: {}, 2: {}}}), make_tree({2: {}, 1: {4: {}, 3: {}}})
    verdicts = verify(tree_proposals(rows, [tree, None, other, tree], 4))
    assert [verdict.emitted for verdict in verdicts] == [(1, 2, 3), (1,), (1, 2), (1, 2, 3)]
    assert seen == [([1, 2, 3, 1, 1, 2, 1, 2, 3], [0, 3, 4])]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(0, (1 << 24) - 1))
def test_candidates_of_a_place_lie_end_to_end(weights: list[float], number: int):
    chances = [weight / max(1.0, sum(weights)) for weight in weights]
    uniform = number / (1 << 24)
    distribution = place_distribution(chances)
    assert len(distribution) == len(chances) + 1
    assert sum(distribution) == pytest.approx(1)
    chosen, edges = chosen_candidate(chances, uniform), [0.0, *accumulate(chances)]
    if chosen is None:
        assert uniform >= edges[-1]
    else:
        assert edges[chosen] <= uniform < edges[chosen + 1]
        assert chances[chosen] > 0


def test_lines_and_paths_of_decisions():
    probs_MV = torch.eye(6)[[1, 3, 4, 2, 4, 0]]  # after the text, and after each of five candidates

    first = SimpleNamespace(uniform=lambda distribution: 0.0)
    decisions = decide_tree(make_tree({2: {4: {}}, 1: {5: {}, 2: {}}}), RowDistributions(probs_MV), first)
    assert [decision.emitted for decision in decisions] == [None, None, 1, None, 2, 0]
    assert accepted_path(decisions) == [2, 4]
    assert emitting_lines(decisions) == [0, 3, 5]
    cut = truncate(decisions, 2, ())
    assert (emitting_lines(cut), accepted_path(cut)) == ([0, 3], [2, 4])


def test_the_number_that_is_logged_decided():
    row = row_of([0], rng=SimpleNamespace(uniform=lambda distribution: 0.3 + 1e-12))
    verdict, _ = verify_block(row, (1, 0, 1))
    for decision in verdict.decisions:
        if decision.uniform is not None:
            assert decision.uniform == float(int(decision.uniform * 2**24)) / 2**24
    assert any(decision.uniform for decision in verdict.decisions)
