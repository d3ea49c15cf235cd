"""The contract of `Stage`, for every implementation: the guarantees of `stages/contract/stage.py`."""

import gc
import importlib
import inspect
import pkgutil
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from doubles import TableModel, row_of
from token_trees import make_tree, tree_proposals
from torch import Tensor

import stages
from stages.choose import ChooseDraft
from stages.contract.blocks import Draft, Proposal, SequenceState, Verdict
from stages.contract.stage import Stage
from stages.decode import Decode
from stages.drafting.costs import Costs
from stages.drafting.head import AcceptanceHead
from stages.drafting.no_model import NoModel
from stages.drafting.sources import SourceChooser
from stages.drafting.stopping import ThresholdStop
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from stages.memory.calibration import own_cell
from stages.memory.text_memory import TextMemory, TreeLimits
from stages.ngrams.cache import NgramCache
from stages.ngrams.trie import Trie
from stages.sampling.params import SamplingParams
from stages.translate import Translate
from stages.verification.judge import Judge, PassResult
from stages.verification.parsing import parse
from stages.verification.rules import TrieRule
from stages.verify import Verify

SPELLING = ((0,), (1,), (0, 1), (2,), None, (2, 0, 1), (3,))
PIECES = 4
SAMPLING = SamplingParams(temperature=1.0)
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def table_logits(seed: int, size: int, history: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *history]).normal(0, 1.5, size))


def table(size: int) -> TableModel:
    return TableModel(partial(table_logits, size, size), size)


def llama(size: int) -> LanguageModel:
    model = new_llama(size, vocab_size=size, num_key_value_heads=1, **SHAPE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # makes the distributions differ from position to position
    tiny = LanguageModel(model, "tiny")
    tiny.reads_trees = tiny.forward_pass.reads_trees
    return tiny


def new_trie() -> Trie:
    trie = Trie(len(SPELLING), PIECES)
    trie.insert_all((pieces, token) for token, pieces in enumerate(SPELLING) if pieces)
    return trie


TRIE = new_trie()  # parses and verifies proposals; nothing changes it


def new_row(offset: int) -> SequenceState:
    prompt = [offset % 4, 1, 0, offset % 3][: 1 + offset % 4]
    return row_of(prompt, offset=offset)


def draft_of(row: SequenceState, block: int) -> Draft:
    """A draft that depends on nothing but the row and the block."""
    generator = np.random.default_rng([row.offset, block])
    draft_probs_KD = torch.from_numpy(generator.dirichlet(np.ones(PIECES), size=int(generator.integers(1, 5)))).float()
    pieces = tuple(int(generator.integers(PIECES)) for _ in draft_probs_KD)
    return Draft(row, pieces, draft_probs_KD, tuple(0.0 for _ in pieces), None, ())


def proposal_of(row: SequenceState, block: int) -> Proposal:
    draft = draft_of(row, block)
    return Proposal(draft, parse(TRIE, draft.pieces))


def tree_proposal_of(row: SequenceState, block: int) -> Proposal:
    """A tree that depends on nothing but the row and the block; some blocks have none."""
    numbers = np.random.default_rng([row.offset, block])

    def branches(depth: int) -> dict[int, Any]:
        tokens = numbers.permutation(len(SPELLING))[: numbers.integers(0, 4)].tolist()
        return {token: branches(depth - 1) for token in tokens} if depth else {}

    found = branches(3)
    return tree_proposals([row], [make_tree(found) if found else None], PIECES)[0]


def new_decode(model: Callable[[int], Any]) -> Decode:
    drafter = model(PIECES)
    head = AcceptanceHead(drafter.hidden_size, 0)
    return Decode(drafter, head, ThresholdStop(0.5), SAMPLING, range(PIECES), max_draft=4, eos_id=3)


def new_choose(model: Callable[[int], Any]) -> ChooseDraft:
    """A choice in which trees cost nothing, so that the trees of other rows do not displace a row's own."""
    free = Costs(((1, 1.0), (2, 1.0)), ((1, 0.24),))
    memory = TextMemory(free, TreeLimits(8, 3, 6), (), budget_bytes=1 << 16)
    for length in range(2, 40):  # matches of one token are left to the model
        for _ in range(30):
            memory.calibration.observe(own_cell(length), hit=True)
    return ChooseDraft(new_decode(model), memory, SourceChooser(free), free)


def new_verify(model: Callable[[int], Any]) -> Verify:
    context = [pieces or () for pieces in SPELLING]
    return Verify(model(len(SPELLING)), TrieRule(TRIE), SAMPLING, context, len(SPELLING), {6}, None)


class DrivenJudge(Judge):
    """A judge of an engine whose tokens depend on nothing but the row and the block."""

    def __call__(self, batch: Sequence[Proposal]) -> list[Verdict]:
        for proposal in batch:
            row, drafted = proposal.draft.row, proposal.verifiable
            numbers = np.random.default_rng([row.offset, row.block, len(row.tokens)])
            followed = drafted[: int(numbers.integers(len(drafted) + 1))]
            self.results[row] = PassResult((*followed, int(numbers.integers(len(SPELLING) - 1))))
        return super().__call__(batch)


def new_judge() -> DrivenJudge:
    return DrivenJudge({6}, [pieces or () for pieces in SPELLING])


def new_translate() -> Translate:
    trie = new_trie()
    return Translate(trie, NgramCache(trie, 0), SPELLING)


@dataclass(frozen=True)
class Seen:
    """Decisions, which must be equal, and numbers, which may differ by rounding."""

    decided: tuple
    numbers: tuple[float, ...] = ()

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, Seen) and self.decided == other.decided
        return alike and self.numbers == pytest.approx(other.numbers, abs=1e-5)


def see_draft(draft: Draft) -> Seen:
    seen = draft.row.offset, draft.pieces, len(draft.survival), draft.tree, draft.expected_tokens
    return Seen(seen, tuple(draft.draft_probs_KD.flatten().tolist()))


def see_proposal(proposal: Proposal) -> Seen:
    spans = [(token.token, token.start, token.stop, len(token.tests)) for token in proposal.tokens]
    return Seen((proposal.draft.row.offset, spans))


def see_verdict(verdict: Verdict) -> Seen:
    outcomes = [(d.index, d.outcome, d.emitted, d.origin, d.uniform) for d in verdict.decisions]
    levels = tuple(level for decision in verdict.decisions for level in decision.target_levels)
    return Seen((verdict.proposal.draft.row.offset, outcomes, verdict.emitted), levels)


def read_on(row: SequenceState) -> None:
    """Advance a row that was only drafted, in place of `Verify`."""
    row.pieces.append((row.offset + len(row.pieces)) % PIECES)


def emit_on(row: SequenceState) -> None:
    """Advance a row in place of `Verify` where target tokens matter, with a text that soon repeats itself."""
    row.tokens.append((row.tokens[-1] + 1) % 3)
    row.pieces.append(row.tokens[-1])


def own_scope(row: SequenceState, block: int) -> SequenceState:
    """Give a row its own scope, so that rows do not see each other's text."""
    row.scope = row.offset
    return row


@dataclass(frozen=True)
class Bench:
    """How to build a stage, make its inputs and compare its outputs."""

    make: Callable[[], Stage]
    feed: Callable[[SequenceState, int], Any]
    see: Callable[[Any], Any]
    after: Callable[[SequenceState], None] = lambda row: None


ALL = {
    "Decode, table": Bench(partial(new_decode, table), lambda row, block: row, see_draft, read_on),
    "Decode, model": Bench(partial(new_decode, llama), lambda row, block: row, see_draft, read_on),
    "ChooseDraft, table": Bench(partial(new_choose, table), own_scope, see_draft, emit_on),
    "ChooseDraft, model": Bench(partial(new_choose, llama), own_scope, see_draft, emit_on),
    "Translate": Bench(new_translate, draft_of, see_proposal),
    "Verify, table": Bench(partial(new_verify, table), proposal_of, see_verdict),
    "Verify, model": Bench(partial(new_verify, llama), proposal_of, see_verdict),
    "Verify, trees, table": Bench(partial(new_verify, table), tree_proposal_of, see_verdict),
    "Verify, trees, model": Bench(partial(new_verify, llama), tree_proposal_of, see_verdict),
    "NoModel": Bench(NoModel, lambda row, block: row, see_draft, read_on),
    "Judge": Bench(new_judge, proposal_of, see_verdict),
}
every_stage = pytest.mark.parametrize("bench", ALL.values(), ids=list(ALL))


def remove(rows: list[SequenceState], row: SequenceState) -> None:
    """Remove a row in the loop's order: the last row takes the place of a released one."""
    last = rows.pop()
    if last is not row:
        rows[rows.index(row)] = last


def run_lifetimes(bench: Bench, spans: dict[int, tuple[int, int]]) -> dict[int, list]:
    """The stage's decisions for rows that are present between two blocks, given as {offset: (first, end)}."""
    stage, rows, seen = bench.make(), [], {offset: [] for offset in spans}
    for block in range(max(end for _, end in spans.values())):
        for row in [row for row in rows if spans[row.offset][1] == block]:
            remove(rows, row)
            stage.release(row)
        for row in [new_row(offset) for offset, (begin, _) in spans.items() if begin == block]:
            rows.append(row)
            stage.admit(row)
        inputs = [bench.feed(row, block - spans[row.offset][0]) for row in rows]
        for row, output in zip(rows, stage(inputs), strict=True):
            seen[row.offset].append(bench.see(output))
            bench.after(row)
    return seen


@every_stage
def test_an_empty_batch_gives_an_empty_list(bench: Bench):
    assert bench.make()([]) == []


@every_stage
def test_there_is_one_output_per_input_in_order(bench: Bench):
    seen = run_lifetimes(bench, dict.fromkeys((5, 2, 9), (0, 1)))
    assert [outputs[0].decided[0] for outputs in seen.values()] == [5, 2, 9]


@every_stage
def test_decisions_of_a_row_do_not_depend_on_which_other_rows_enter_and_leave(bench: Bench):
    spans = {0: (0, 2), 1: (0, 5), 2: (0, 1), 3: (1, 5), 7: (2, 4), 6: (0, 3), 9: (3, 5)}
    together = run_lifetimes(bench, spans)
    for offset, (begin, end) in spans.items():
        assert together[offset] == run_lifetimes(bench, {offset: (0, end - begin)})[offset], f"row {offset}"


@every_stage
def test_a_stage_leaves_global_random_states_unchanged(bench: Bench):
    stage, rows = bench.make(), [new_row(offset) for offset in (3, 4)]
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for row in rows:
        stage.admit(row)
    stage([bench.feed(row, 0) for row in rows])
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


@pytest.mark.usefixtures("small_heap")
@every_stage
def test_an_input_is_released_after_the_call(bench: Bench):
    stage, row = bench.make(), new_row(3)
    stage.admit(row)
    given = bench.feed(row, 0)
    references = [weakref.ref(given)] if given is not row else []
    stage([given])
    del given
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.usefixtures("small_heap")
@every_stage
def test_a_row_is_freed_after_its_release(bench: Bench):
    stage, row, other = bench.make(), new_row(3), new_row(6)
    for each in (row, other):
        stage.admit(each)
    stage([bench.feed(each, 0) for each in (row, other)])
    stage.release(row)
    reference = weakref.ref(row)
    del row, each
    gc.collect()
    assert reference() is None


def test_the_rows_of_the_chooser_get_trees_and_drafts_of_the_model():
    seen = run_lifetimes(ALL["ChooseDraft, table"], dict.fromkeys(range(4), (0, 6)))
    drafts = [draft.decided for outputs in seen.values() for draft in outputs]
    assert {(bool(pieces), tree is not None) for _, pieces, _, tree, _ in drafts} >= {(True, False), (False, True)}


def implementations() -> set[str]:
    """Classes anywhere in `stages` that have the protocol's three methods, without the protocol itself."""
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(stages.__path__, "stages.")]
    classes = {
        cls
        for module in modules
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__
    }
    methods = {"__call__", "admit", "release"}
    return {
        cls.__name__ for cls in classes - {Stage} if methods <= {name for base in cls.__mro__ for name in vars(base)}
    }


def test_no_implementation_is_missing_from_this_suite():
    assert implementations() == {name.split(",")[0] for name in ALL}
