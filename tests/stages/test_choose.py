"""The choice between trees and drafts of the model: by expected tokens per cost, from past verdicts alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from doubles import TableModel, row_of
from stored_states import store
from token_trees import make_tree, tree_draft

from stages.choose import LABELS_AFTER_DRIFT, TRAINED_LABELS_AFTER_DRIFT, ChooseDraft
from stages.contract.blocks import Decision, Draft, Proposal, ProposedToken, SequenceState, Verdict
from stages.decode import Decode
from stages.drafting.costs import BlockTimes, Costs, ReadPrompts, StageSeconds
from stages.drafting.head import AcceptanceHead
from stages.drafting.selection import Selection
from stages.drafting.sources import GAIN_EDGES, TRIED_BLOCKS, TRIED_PROMPTS, Exploration, SourceChooser
from stages.drafting.stopping import CostStop, FixedLength
from stages.drafting.tracked_costs import TrackedCosts
from stages.memory.calibration import own_cell
from stages.memory.text_memory import GrownTree, TextMemory, TreeLimits
from stages.ngrams.trie import Trie
from stages.sampling.params import SamplingParams
from stages.verification.parsing import parse
from store.events import Action, DraftSource, Origin, Outcome

PIECES = 6
COSTS, CHEAP = (Costs(((1, 1.0), (2, 1.06)), ((1, drafting),)) for drafting in (0.24, 0.02))


# The comparison.


def make_chooser(drafting: float = 0.24, verifying: float = 0.06, rows: int = 1) -> SourceChooser:
    """Costs of a piece in target passes."""
    return SourceChooser(Costs(((1, 1.0), (2, 1.0 + verifying)), ((1, drafting),)), rows)


def prefers_model(chooser: SourceChooser, candidates: int, expected: float, more: float = 0.0) -> bool:
    return chooser.choose(candidates, expected, more=more) is Action.MODEL


def draft_of(row: SequenceState, pieces: Sequence[int]) -> Draft:
    return Draft(row, tuple(pieces), torch.eye(PIECES)[list(pieces)], (0.0,) * len(pieces), None, ())


def verdict_of(draft: Draft, accepted: int, emitted: Sequence[int] = ()) -> Verdict:
    """One token per piece; so many were accepted, the next was not."""
    tokens = tuple(ProposedToken(piece, n, n + 1, ()) for n, piece in enumerate(draft.pieces))
    decisions = tuple(
        Decision(n, token, Outcome.ACCEPTED, token.token, Origin.ACCEPTED) for n, token in enumerate(tokens[:accepted])
    )
    return Verdict(Proposal(draft, tokens), decisions, tuple(emitted), accepted, accepted)


def by_model(drafted: int, accepted: int) -> Verdict:
    return verdict_of(draft_of(row_of([1]), [0] * drafted), accepted)


def by_tree() -> Verdict:
    draft = tree_draft(row_of([1]), make_tree({1: {}}), PIECES, torch.float32)
    return Verdict(Proposal(draft, ()), (), (1,), 1, 1)


def teach(chooser: SourceChooser, verdict: Verdict, expected: float, times: int = 1) -> None:
    """Show the chooser blocks whose source is that of the draft, and of whose draft no piece was dropped."""
    draft = verdict.proposal.draft
    action = Action.MODEL if draft.source is DraftSource.MODEL else Action.COPIES
    for _ in range(times):
        chooser.observe(verdict, action, expected, len(draft.pieces))


def test_before_anything_is_known_a_tree_must_promise_more_than_the_model_usually_gives():
    chooser = make_chooser()
    assert prefers_model(chooser, 1, 0.1)
    assert not prefers_model(chooser, 4, 3.0)
    assert prefers_model(chooser, 0, 0.0), "without candidates there is no tree"


def test_trees_of_another_gain_are_compared_with_the_model_s_drafts_where_trees_gained_as_much():
    chooser = make_chooser(drafting=0.1)
    for _ in range(60):
        teach(chooser, by_model(8, 8), expected=2.0)
        teach(chooser, by_model(8, 0), expected=0.7)
    assert prefers_model(chooser, 4, 2.0)
    assert not prefers_model(chooser, 2, 0.7)


def test_a_model_that_ceases_to_be_accepted_is_given_up_soon():
    chooser = make_chooser(drafting=0.05)
    teach(chooser, by_model(8, 8), expected=1.2, times=300)
    blocks = 0
    while prefers_model(chooser, 2, 1.2):
        teach(chooser, by_model(8, 0), expected=1.2)
        blocks += 1
    assert blocks < 120


def count_drafts(chooser: SourceChooser, blocks: int, accepted: int = 0, expected: float = 0.0) -> int:
    """In how many of the next blocks the model is preferred; it drafts two pieces there, and in trials. Other blocks
    have a tree of one candidate, or nothing where none is expected to be accepted.
    """
    count = 0
    for block in range(blocks):
        model = prefers_model(chooser, int(expected > 0), expected)
        count += model
        trial = block % (TRIED_PROMPTS * TRIED_BLOCKS) == 0
        teach(chooser, by_model(2, accepted) if model or trial else by_tree(), expected)
    return count


def test_a_few_rejected_drafts_do_not_decide():
    chooser = make_chooser(drafting=0.1)
    assert count_drafts(chooser, 2) == 2
    assert count_drafts(chooser, 100, accepted=2) > 80


def test_a_model_whose_drafts_are_all_rejected_is_hardly_preferred():
    chooser = make_chooser()
    assert 1 <= count_drafts(chooser, 100) < 12
    assert count_drafts(chooser, 2000) == 0


def test_a_model_that_becomes_better_is_used_again():
    chooser = make_chooser(drafting=0.1)
    count_drafts(chooser, 1000)
    assert count_drafts(chooser, 400, accepted=2) > 100
    assert count_drafts(chooser, 200, accepted=2) == 200


def test_a_model_that_may_have_become_better_is_tried_at_once():
    chooser = make_chooser()
    count_drafts(chooser, 300)
    assert not prefers_model(chooser, 0, 0.0)
    chooser.try_model()
    assert prefers_model(chooser, 0, 0.0)
    assert not prefers_model(chooser, 4, 3.0), "where trees promise far more it is not"
    assert count_drafts(chooser, 200) < 10


def test_other_kinds_of_blocks_hardly_count_for_one_in_which_the_model_is_known():
    chooser = make_chooser()
    teach(chooser, by_model(2, 2), expected=0.2, times=40)
    teach(chooser, by_model(2, 0), expected=0.0, times=200)
    assert prefers_model(chooser, 1, 0.2)
    assert not prefers_model(chooser, 0, 0.0)


def test_a_block_in_which_the_model_proposed_nothing_is_no_evidence_of_its_tokens():
    """Its distribution was not finite: it cost a block without drafts, and gave what such a block gives."""
    chooser = make_chooser()
    teach(chooser, by_model(0, 0), expected=3.0, times=400)
    assert chooser.foresee_model(3.0) == pytest.approx((1, 1), abs=0.1)


def test_all_rows_of_a_batch_are_taken_to_have_equal_drafts():
    """A candidate costs relatively more where a pass reads many tokens."""
    few, many = make_chooser(verifying=0.1), make_chooser(verifying=0.1, rows=8)
    assert few.choose(4, 1.0, model=False) is Action.COPIES
    assert many.choose(4, 1.0, model=False) is Action.NOTHING


def test_the_statistics_are_restored():
    chooser = make_chooser()
    for number in range(40):
        teach(chooser, by_model(4, number % 5) if number % 3 else by_tree(), expected=number % 7 / 2)
    state = store(chooser.state_dict())
    again = make_chooser()
    again.load_state_dict(state)
    assert again.state_dict() == chooser.state_dict() != make_chooser().state_dict()
    assert len(chooser.state_dict()) == 1 + len(GAIN_EDGES) + 1
    for one in (chooser, again):
        teach(one, by_model(4, 2), expected=0.2)
    assert again.state_dict() == chooser.state_dict()


def test_former_drafts_cost_what_they_would_cost_today():
    costs = TrackedCosts(Costs(((1, 1.0), (2, 1.06)), ((1, 0.1),)))
    chooser = SourceChooser(costs)
    preferred = []
    for drafting in (2.0, 0.2):  # seconds of two pieces
        for _ in range(200):
            costs.observe(BlockTimes([2], 3, drafting, 1.12))
        preferred.append(prefers_model(chooser, 0, 0.0))
        teach(chooser, by_model(2, 1), expected=0.0, times=20)
    assert preferred == [False, True]


def test_what_else_a_draft_costs_for_a_row_counts():
    chooser = make_chooser()
    assert [prefers_model(chooser, 1, 0.1, more) for more in (0.0, 0.1, 0.5)] == [True, True, False]


@pytest.mark.parametrize("may_rest", [True, False])
def test_pieces_that_were_drawn_and_dropped_are_paid_for(may_rest: bool):
    chooser = SourceChooser(Costs(((1, 1.0), (2, 1.06)), ((1, 0.3),)), may_rest=may_rest)
    for _ in range(60):
        chooser.observe(by_model(0, 0), Action.MODEL, 0.0, 1)
    assert prefers_model(chooser, 0, 0.0) is not may_rest, "nothing is drafted where the model only costs"
    assert not prefers_model(chooser, 1, 0.09), "a tree that costs less is used"


# The stage.


def table_model() -> TableModel:
    return TableModel(lambda history: torch.arange(PIECES).roll(history[-1]).double(), PIECES)


def new_stage(costs: Costs = COSTS, sure: bool = True, **options: Any):
    """The stage; its memory is sure of matches of the own text of two tokens and more, if it is `sure`."""
    model = table_model()
    head = AcceptanceHead(model.hidden_size, 0)
    decode = Decode(model, head, FixedLength(), SamplingParams(1.0), range(PIECES), 3, None)
    memory = TextMemory(costs, TreeLimits(8, 3, 6), (), budget_bytes=1 << 16)
    for length in range(2, 40):
        for _ in range(20 * sure):
            memory.calibration.observe(own_cell(length), hit=True)
    return ChooseDraft(decode, memory, SourceChooser(costs), costs, **options)


def admit(stage: ChooseDraft, *rows: SequenceState) -> list[SequenceState]:
    for row in rows:
        stage.admit(row)
    return list(rows)


def emit(
    stage: ChooseDraft, drafts: Sequence[Draft], *tokens: int, accepted: int = 0, seconds: StageSeconds | None = None
) -> list[Verdict]:
    """Change the rows as `Verify` does, and apply the update after it. Pieces and tokens are the same numbers."""
    verdicts = []
    for draft in drafts:
        draft.row.tokens.extend(tokens)
        draft.row.pieces.extend(tokens)
        draft.row.remaining_tokens -= len(tokens)
        draft.row.block += 1
        verdicts.append(verdict_of(draft, accepted if draft.pieces else (len(tokens) - 1) * bool(draft.tree), tokens))
    stage.observe(verdicts, seconds)
    return verdicts


def test_the_model_drafts_where_nothing_is_known_and_trees_where_they_pay():
    stage = new_stage()
    rows = admit(stage, row_of([1, 2, 3, 4, 1, 2], offset=0), row_of([1, 2, 3, 4, 5], offset=1))
    tree, drafted = stage(rows)
    assert (tree.source, tree.tree.tokens[:4], tree.pieces) == (DraftSource.LOOKUP, (3, 4, 1, 2), ())
    assert (drafted.source, drafted.tree, len(drafted.pieces)) == (DraftSource.MODEL, None, 3)
    assert [draft.row for draft in (tree, drafted)] == rows


def test_a_prompt_is_not_read_for_a_few_tokens():
    """Reading a piece of a prompt takes as long as 0.05 target passes."""
    costs = TrackedCosts(COSTS)
    stage = new_stage(costs)
    for _ in range(20):
        costs.observe(BlockTimes([3], 4, 3 * 0.24, 1.18, prompts=ReadPrompts(60, 3.0)))
    short, long = admit(stage, row_of([0] * 50, offset=0, remaining_tokens=4), row_of([0] * 50, offset=1))
    stage.memory.grow = lambda rows: [GrownTree(None, 0.0) for _ in rows]
    assert [bool(draft.pieces) for draft in stage([short, long])] == [False, True]
    long.remaining_tokens = 4
    assert [bool(draft.pieces) for draft in stage([short, long])] == [False, True], "what is read costs nothing more"


def test_the_seconds_in_which_prompts_are_read_are_not_those_of_drafts(monkeypatch: pytest.MonkeyPatch):
    seen: list[BlockTimes] = []
    stage = new_stage()
    monkeypatch.setattr(type(stage._costs), "observe", lambda self, times: seen.append(times))
    (row,) = admit(stage, row_of([1, 2, 3, 4, 5]))
    for _ in range(2):
        drafts = stage([row])
        stage._decode.prompts = ReadPrompts(5, 0.25)
        emit(stage, drafts, 3, seconds=StageSeconds(1.0, 2.0, 0.5))
    stage._decode.prompts = ReadPrompts(5, 0.0, measured=False)
    emit(stage, drafts, 3, seconds=StageSeconds(1.0, 2.0, 0.5))
    assert [(one.drafting, one.verifying, one.prompts.seconds) for one in seen] == [(0.75, 2.0, 0.25)]


@pytest.mark.parametrize("model", [True, False])
def test_a_tree_that_promises_little_is_left_to_the_model_if_it_is_a_source(model: bool):
    stage = new_stage(CHEAP, sure=False, model=model)
    (draft,) = stage(admit(stage, row_of([1, 2, 3, 4, 1, 2])))
    assert (draft.source is DraftSource.MODEL, draft.tree is None) == (model, model)


def test_completed_rows_are_a_source():
    stage = new_stage()
    for _ in range(30):
        (row,) = admit(stage, row_of([1]))
        emit(stage, stage([row]), 2, 3, 4)
        stage.release(row)
    (row,) = admit(stage, row_of([5, 1]))
    (draft,) = stage([row])
    assert (draft.source, draft.tree.tokens[:3]) == (DraftSource.MEMORY, (2, 3, 4))


def test_a_tree_has_no_distributions_and_no_random_number():
    stage = new_stage()
    (row,) = admit(stage, row_of([1, 2, 3, 4, 1, 2]))
    before = row_of([0]).rng.uniform(torch.ones(1))
    (draft,) = stage([row])
    assert tuple(draft.draft_probs_KD.shape) == (0, PIECES)
    assert (draft.entropies, draft.features_KF, draft.survival) == ((), None, ())
    assert row.rng.uniform(torch.ones(1)) == before


def test_what_a_tree_is_expected_to_emit_and_to_cost_is_part_of_the_draft():
    stage = new_stage()
    rows = admit(stage, *(row_of([1, 2, 3, 4, 1, 2], offset=number) for number in range(3)))
    rows += admit(stage, row_of([0], offset=3))
    drafts = stage(rows)
    candidates = sum(len(draft.tree.candidates) for draft in drafts[:3])
    for draft in drafts[:3]:
        survival, expected = {-1: 1.0}, 1.0
        for index, candidate in enumerate(draft.tree.candidates):
            survival[index] = survival[candidate.parent] * candidate.chance
            expected += survival[index]
        assert draft.expected_tokens == pytest.approx(expected)
        assert draft.expected_seconds == pytest.approx(COSTS.verification_cost(4 + candidates) / 4)
    assert (drafts[3].expected_tokens, drafts[3].expected_seconds) == (None, None)


def test_the_model_is_never_used_if_it_is_no_source():
    stage = new_stage(model=False)
    rows = admit(stage, row_of([1, 2, 3, 4, 1, 2], remaining_tokens=999), row_of([3, 4, 5], offset=1))
    read = stage._decode.model.tokens_read(rows[1])
    for _ in range(64):
        first, second = stage(rows)
        assert first.tree
        assert (second.pieces, second.tree) == ((), None)
        rows[1].tokens[:] = [3, 4, 5]
        emit(stage, [first], *first.tree.tokens[:2])
        stage.memory.observe([verdict_of(second, 0)])
    assert stage._decode.model.tokens_read(rows[1]) == read


def sources_of_blocks(stage: ChooseDraft, row: SequenceState, blocks: int) -> list[DraftSource]:
    """Return the source of the draft of each of the next blocks. In all of them the row's own text has a sure tree."""
    found = []
    for _ in range(blocks):
        (draft,) = stage([row])
        found.append(draft.source)
        emit(stage, [draft], 3, 5, 1)
    return found


@pytest.mark.parametrize(("accepted", "tried"), [(2, {1, 3, 4, 6}), (0, {4})])
def test_a_few_blocks_of_some_prompts_try_the_model_where_it_does_not_pay(accepted: int, tried: set[int]):
    """What is accepted there is known, so a fall and a rise are noticed. Fewer where little is accepted."""
    stage = new_stage()
    teach(stage._chooser, by_model(3, accepted), expected=0.0, times=20)
    stage._chooser.choose = lambda *promised, **options: Action.NOTHING
    rows = admit(stage, *(row_of([5, 1], offset=offset, remaining_tokens=999) for offset in range(8)))
    for block in range(4 * TRIED_BLOCKS):
        drafts = stage(rows)
        drafted = {draft.row.offset for draft in drafts if draft.action is Action.MODEL}
        assert drafted == (tried if block % TRIED_BLOCKS == 1 else set())
        emit(stage, drafts, 3, accepted=accepted)


@pytest.mark.parametrize(("accepted", "length"), [(None, 2), (2, 3), (0, 1)])
def test_a_head_that_never_learned_does_not_decide_how_long_drafts_are(accepted: int | None, length: int):
    """The acceptance of the last drafts does, and what a piece costs: here 0.3 passes."""
    costs = Costs(((1, 1.0), (2, 1.0)), ((1, 0.3),))
    stage = new_stage(costs)
    stage._decode.trusts_head, stage._decode._stop_rule = False, CostStop(costs)
    if accepted is not None:
        teach(stage._chooser, replace(by_model(2, accepted), judged=2), expected=0.0, times=40)
    stage._chooser.choose = lambda *promised, **options: Action.MODEL
    (draft,) = stage(admit(stage, row_of([5, 1])))
    assert len(draft.pieces) == length


def test_trials_count_among_the_drafts_of_the_model():
    stage, accepted = new_stage(), []
    stage._chooser.observe = lambda verdict, *given: accepted.append(verdict.accepted)
    stage._chooser.choose = lambda *promised, **options: Action.NOTHING
    (row,) = admit(stage, row_of([5, 1], offset=1, remaining_tokens=999))
    for _ in range(TRIED_BLOCKS):
        emit(stage, stage([row]), 3, accepted=2)
    assert accepted == [2 * (block == 1) for block in range(TRIED_BLOCKS)]


def stage_after_drift(**options: Any) -> tuple[ChooseDraft, SequenceState]:
    """The stage after a drift, and a row in which trees were preferred before it."""
    stage = new_stage(**options)
    (row,) = admit(stage, row_of([5, 1], remaining_tokens=999))
    assert sources_of_blocks(stage, row, 20)[10:] == [DraftSource.LOOKUP] * 10
    stage.resume_speculation()
    stage.respond_to_drift()
    return stage, row


@pytest.mark.parametrize(
    ("options", "drafts"),
    [({}, LABELS_AFTER_DRIFT), ({"labels_after_drift": TRAINED_LABELS_AFTER_DRIFT}, 12)],
    ids=["untrained", "trained"],
)
def test_the_model_drafts_where_trees_are_preferred_after_a_drift(options: dict[str, int], drafts: int):
    """Each draft has a label. Fewer are made where the head came trained."""
    found = sources_of_blocks(*stage_after_drift(**options), drafts + 10)
    assert found == [DraftSource.MODEL] * drafts + [DraftSource.LOOKUP] * 10


def test_after_an_update_the_model_is_tried_where_trees_promise_little():
    stage = new_stage(sure=False)
    (row,) = admit(stage, row_of([1, 2, 3, 4, 1, 2], remaining_tokens=999))
    for _ in range(200):
        emit(stage, stage([row]), 5)
        row.tokens[:], row.pieces[:] = [1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 1, 2]
    assert stage([row])[0].action is not Action.MODEL
    stage.resume_speculation()
    assert stage([row])[0].action is Action.MODEL


def test_drafts_with_more_labels_are_fewer_after_a_drift():
    (stage, row), judged = stage_after_drift(), []
    for _ in range(LABELS_AFTER_DRIFT):
        drafts = stage([row])
        if drafts[0].source is DraftSource.MODEL:
            judged += [verdict.judged for verdict in emit(stage, drafts, 3, 5, 1, accepted=2)]
    assert judged == [2] * (LABELS_AFTER_DRIFT // 2)


def test_after_a_drift_all_pieces_are_verified_so_that_the_head_gets_labels():
    stage = new_stage()
    stage._decode._sampling = SamplingParams()
    stage._decode.selection = Selection(COSTS, Trie(PIECES, PIECES), parse)
    (row,) = admit(stage, row_of([5, 1], offset=1, remaining_tokens=999))
    assert stage([row])[0].droppable
    stage.respond_to_drift()
    for _ in range(LABELS_AFTER_DRIFT):
        (draft,) = stage([row])
        assert (len(draft.pieces), draft.droppable) == (3, False)
        emit(stage, [draft], 0)
    assert stage._decode([row])[0].droppable


def test_a_model_that_drafts_after_many_trees_reads_all_that_it_missed():
    """Its distributions are those of a model that always drafted, whatever else is in the batch."""
    stage, model = new_stage(), table_model()
    row, other = row_of([5, 1], remaining_tokens=999), row_of([2, 2, 3, 2, 2], offset=1, remaining_tokens=999)
    admit(stage, row, other)
    kinds = []
    for block, emitted in enumerate(([3, 5, 1], *([3, 5, 1] for _ in range(34)), [0], [4], [2])):
        if block == 30:
            stage.respond_to_drift()
        draft, another = stage([row, other])
        kinds.append(draft.action)
        if draft.pieces:
            history = [*row.pieces, *draft.pieces[:-1]]
            wanted = [model._logits(tuple(history[: len(row.pieces) + n])).softmax(0) for n in range(len(draft.pieces))]
            torch.testing.assert_close(draft.draft_probs_KD, torch.stack(wanted).float())
        emit(stage, [draft], *emitted)
        emit(stage, [another], 3, 2, 2)
    assert kinds[0] is Action.MODEL
    assert kinds[2:30] == [Action.COPIES] * 28
    assert kinds[30:] == [Action.MODEL] * 8


def test_the_chooser_learns_what_the_tree_of_a_row_promised_whatever_drafted():
    stage, noted = new_stage(), []
    stage._chooser.observe = lambda verdict, action, expected, drawn: noted.append((action, expected))
    rows = admit(stage, row_of([1, 2, 3, 4, 1, 2], offset=0), row_of([1, 2, 3, 4, 5], offset=1))
    stage._chooser.choose = lambda *promised, **options: Action.MODEL
    drafts = stage(rows)
    emit(stage, drafts, 3)
    assert [action for action, _ in noted] == [Action.MODEL] * 2
    assert noted[0][1] > 1
    assert noted[1][1] == 0


def test_the_choice_is_made_before_the_model_drafts(monkeypatch: pytest.MonkeyPatch):
    """A choice that depended on the model's draws would change the distribution of its pieces."""
    stage, calls = new_stage(), []
    (row,) = admit(stage, row_of([1, 2, 3, 4, 1, 2]))
    draft, choose = Decode.__call__, stage._chooser.choose
    monkeypatch.setattr(Decode, "__call__", lambda *given, **chosen: calls.append("draft") or draft(*given, **chosen))
    stage._chooser.choose = lambda *promised, **options: calls.append("choose") or choose(*promised, **options)
    stage([row])
    assert calls == ["choose", "draft"]


def test_a_stage_that_is_restored_continues_alike():
    def run(stage: ChooseDraft, rows: list[SequenceState], count: int) -> list[tuple]:
        seen, numbers = [], np.random.default_rng(count)
        for _ in range(count):
            drafts = stage(rows)
            seen += [(draft.pieces, draft.tree, draft.expected_tokens, draft.source) for draft in drafts]
            emit(stage, drafts, *numbers.integers(0, PIECES, 3).tolist(), accepted=3)
        return seen

    def with_saving(stage: ChooseDraft) -> ChooseDraft:
        model = stage._decode.model
        model.state_dict = lambda rows: [(row, model.tokens_read(row)) for row in model._order if row in rows]

        def load_state_dict(state: Any) -> None:
            for row, tokens in state:
                model.admit(row, [*tokens, 0])

        model.load_state_dict = load_state_dict
        return stage

    stage = with_saving(new_stage())
    (gone,) = admit(stage, row_of([1, 2]))
    run(stage, [gone], 4)
    stage.release(gone)
    rows = admit(stage, row_of([1, 2, 3, 1, 2], offset=0), row_of([3, 4, 1], offset=1))
    run(stage, rows, 9)
    state = store([rows, stage.state_dict(rows)])
    again = with_saving(new_stage(sure=False))
    again.load_state_dict(state[1])
    restored = state[0]
    seen = run(stage, rows, 20)
    assert run(again, restored, 20) == seen
    assert {source for *_, source in seen} >= {DraftSource.MODEL, DraftSource.LOOKUP}


def test_a_drift_gives_new_text_more_weight():
    stage = new_stage()
    stage.memory.table.learn([1, 2, 1, 2, 1, 2], 1)
    stage.respond_to_drift()
    assert stage.memory.table.find([1])[0][1].total == 2


# The exploration.

KNOWN, UNKNOWN = [1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5]  # texts with and without a continuation of their own


@pytest.mark.parametrize(
    ("action", "text", "pieces", "tree"),
    [
        (Action.NOTHING, KNOWN, 0, False),
        (Action.NOTHING, UNKNOWN, 0, False),
        (Action.MODEL, KNOWN, 3, False),
        (Action.COPIES, KNOWN, 0, True),
        (Action.COPIES, UNKNOWN, 0, False),  # they know nothing
    ],
)
def test_the_drawn_action_is_taken_though_another_is_preferred(action: Action, text: list, pieces: int, tree: bool):
    """A tree is preferred where it is known, unless copies are drawn; then the model is."""
    stage = new_stage(CHEAP, sure=action is not Action.COPIES, exploration=Exploration(0.5, 0, [action]))
    (row,) = admit(stage, row_of(text))
    row.block = next(n for n in range(50) if stage._exploration.choose(row.offset, n, Action.COPIES).drawn)
    (draft,) = stage([row])
    assert (len(draft.pieces), draft.tree is not None) == (pieces, tree)
    assert (draft.action, draft.propensity) == (action, 0.5)
    before = stage._chooser.state_dict()
    emit(stage, [draft], 5)
    assert stage._chooser.state_dict() == before, "what is drawn is no part of the comparison"


def test_without_a_holdout_each_draft_has_its_action():
    stage = new_stage()
    drafts = stage(admit(stage, row_of(KNOWN, offset=0), row_of(UNKNOWN, offset=1)))
    assert [(draft.action, draft.propensity) for draft in drafts] == [(Action.COPIES, 1.0), (Action.MODEL, 1.0)]


def test_where_a_tree_takes_longer_than_it_gives_nothing_is_drafted_and_it_is_tried_again():
    """A tree of which nothing is accepted promises tokens; by the seconds of its blocks it costs five passes."""
    stage = new_stage(TrackedCosts(COSTS), model=False, exploration=Exploration(0.1, 0, [Action.NOTHING]))
    (row,) = admit(stage, row_of([1, 2, 3, 4, 1, 2], remaining_tokens=9999))
    row.block = 1  # its prompt is read
    found = []
    for _ in range(600):
        (draft,) = stage([row])
        found.append(draft.tree is not None)
        emit(stage, [draft], 3, seconds=StageSeconds(0.0, 1.06, 8.0 if draft.tree else 0.0))
        row.tokens[:], row.pieces[:] = [1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 1, 2]
    assert found[:2] == [True, True]
    assert 0 < sum(found[200:]) < 40
