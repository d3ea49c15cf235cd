"""Snapshots without rows in flight, and without private rows: the omitted rows leave no trace."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from test_rows_apart import Request, row_of, serve, stages_of

from stages.choose import ChooseDraft
from stages.contract.blocks import SequenceState
from stages.contract.snapshot import Snapshot, read_snapshot
from stages.decode import Decode
from stages.drafting.costs import Costs
from stages.drafting.sources import SourceChooser
from stages.memory.text_memory import TextMemory, TreeLimits
from stages.sampling.params import SamplingParams
from stages.verify import Verify

REQUESTS = [
    Request((0, 1, 2), SamplingParams(), 1, remaining_tokens=40),
    Request((3,), SamplingParams(1.0), 2, remaining_tokens=40, logprobs=1),
    Request((5, 6), SamplingParams(0.7, 0, 0.8), 3, remaining_tokens=40),
    Request((0, 1), SamplingParams(), 4, remaining_tokens=40),
]


@dataclass
class Block:
    """Stages and their rows in flight."""

    stages: tuple[Any, Any, Verify]
    rows: list[SequenceState]

    @property
    def decode(self) -> Decode | ChooseDraft:
        return self.stages[0]

    def run(self, count: int) -> list[tuple[int, ...]]:
        """Run `count` blocks and return the tokens that each row emits."""
        decode, translate, judge = self.stages
        found: list[tuple[int, ...]] = [() for _ in self.rows]
        for _ in range(count):
            verdicts = judge(translate(decode(self.rows)))
            if isinstance(decode, ChooseDraft):
                decode.observe(verdicts)
            found = [known + verdict.emitted for known, verdict in zip(found, verdicts, strict=True)]
        return found

    def release(self, rows: Sequence[SequenceState]) -> None:
        for row in rows:
            for stage in self.stages:
                stage.release(row)

    def save(self, *, with_rows: bool = True) -> dict[str, bytes]:
        rows = [row for row in self.rows if with_rows and not row.private]
        return Snapshot({"rows": rows, "stages": [stage.state_dict(rows) for stage in self.stages]}).files()


def fresh(kind: str, forward: str) -> tuple[Any, Any, Verify]:
    decode, translate, judge = stages_of(forward, 3)
    if kind == "decode":
        return decode, translate, judge
    costs = Costs(((1, 1.0), (2, 1.05)), ((1, 0.45),))
    memory = TextMemory(costs, TreeLimits(8, 3, 4), (), budget_bytes=1 << 14)
    return ChooseDraft(decode, memory, SourceChooser(costs, 4), costs), translate, judge


def start_block(kind: str, forward: str, private: Sequence[int] = ()) -> Block:
    """Run all rows for three blocks and return them in flight."""
    block = Block(fresh(kind, forward), [])
    for number, request in enumerate(REQUESTS):
        row = row_of(request, number)
        row.text, row.private = f"words of {number}", number in private
        block.rows.append(row)
        for stage in block.stages:
            stage.admit(row)
    block.run(3)
    assert not any(row.finish for row in block.rows)
    return block


def restore_block(kind: str, forward: str, files: dict[str, bytes]) -> Block:
    state = read_snapshot(files)
    block = Block(fresh(kind, forward), state["rows"])
    for stage, saved in zip(block.stages, state["stages"], strict=True):
        stage.load_state_dict(saved)
    return block


every_kind = pytest.mark.parametrize("kind", ["decode", "choose"])
every_forward = pytest.mark.parametrize("forward", ["packed", "modules"])


@every_kind
@every_forward
def test_without_rows_a_snapshot_is_as_if_none_were_admitted(kind: str, forward: str):
    # The text of a row is learned when the row is released, unless it is private.
    block = start_block(kind, forward, private=range(4) if kind == "choose" else ())
    files = block.save(with_rows=False)
    assert (files != block.save()) == (kind == "decode")
    block.release(block.rows)
    block.rows = []
    assert files == block.save()


@pytest.mark.slow
@every_kind
@every_forward
def test_a_stage_that_was_saved_without_rows_takes_new_ones(kind: str, forward: str):
    again = restore_block(kind, forward, start_block(kind, forward).save(with_rows=False))
    assert again.rows == []
    if kind == "decode":  # otherwise the source of drafts depends on the past
        (answer,), (wanted,) = (serve(stages, REQUESTS[1:2]) for stages in (again.stages, fresh(kind, forward)))
        assert answer.tokens == wanted.tokens
    for stage in again.stages:
        stage.admit(row_of(REQUESTS[1], 1))


@pytest.mark.parametrize(
    ("kind", "private"),
    # The benefit of trees is learned from all rows: without some of them the estimates differ from here on.
    [("decode", ()), ("decode", (0,)), ("decode", (1, 3)), ("decode", (0, 1, 2, 3)), ("choose", ())],
)
@every_forward
def test_private_rows_are_left_out_and_the_others_continue_unchanged(kind: str, forward: str, private: tuple):
    block = start_block(kind, forward, private)
    files = block.save()
    content = b"".join(files.values())
    assert [number for number in range(4) if f"words of {number}".encode() not in content] == list(private)
    again = restore_block(kind, forward, files)
    assert [row.offset for row in again.rows] == [number for number in range(4) if number not in private]
    on = dict(zip([row.offset for row in block.rows], block.run(3), strict=True))
    if again.rows:
        assert again.run(3) == [on[row.offset] for row in again.rows]


@every_forward
def test_the_trees_of_a_block_are_restored_with_the_memory_of_completed_rows(forward: str):
    block = start_block("choose", forward)
    gone = block.rows.pop()
    block.release([gone])
    again = restore_block("choose", forward, block.save())
    trees = [draft.tree for draft in block.decode(block.rows)]
    assert [draft.tree for draft in again.decode(again.rows)] == trees
    assert len(again.decode.memory.table) == len(block.decode.memory.table) > 0
