"""Snapshots give back what was kept: to the last bit, and as one object what was one object."""

import json
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.contract.blocks import OffPolicySpan, SequenceState, SoftTarget, TopTokens, TrainingExample
from stages.contract.snapshot import (
    STATE,
    TENSORS,
    WEIGHTS,
    RandomState,
    SnapshotReader,
    SnapshotWriter,
    restore_moments,
    save_moments,
)
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import SeededRandomSource
from stages.vocabulary.text_stream import StopStrings
from store.errors import CorruptError

ids = st.integers(0, 2**31 - 1)
narrow = st.floats(0, 1, width=32)
wide = st.floats(0, 1)


def soft_targets_of(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[SoftTarget, ...]]:
    rows = st.lists(st.tuples(ids, numbers, numbers), max_size=4)
    return st.lists(
        st.builds(
            lambda position, depth, rows, rest: SoftTarget(
                position,
                depth,
                tuple(row[0] for row in rows),
                tuple(row[1] for row in rows),
                tuple(row[2] for row in rows),
                rest,
            ),
            ids,
            st.integers(0, 5),
            rows,
            numbers,
        ),
        max_size=4,
    ).map(tuple)


def examples_of(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[TrainingExample]:
    soft_targets = soft_targets_of(numbers)
    numbers_of = st.lists(ids, max_size=5).map(tuple)
    branches = st.lists(st.builds(OffPolicySpan, ids, numbers_of, soft_targets), max_size=2).map(tuple)
    return st.builds(
        TrainingExample, ids, st.text(max_size=5), numbers_of, soft_targets, st.just(()), numbers_of, ids, branches
    )


def same(one: TrainingExample, other: TrainingExample) -> bool:
    """Examples are compared as objects; here by their values."""
    return all(getattr(one, name) == getattr(other, name) for name in TrainingExample.__dataclass_fields__)


@given(st.lists(st.one_of(examples_of(narrow), examples_of(wide)), max_size=5))
def test_examples_come_back_as_they_were(examples: list[TrainingExample]):
    keep = SnapshotWriter()
    numbers = [keep.example(example) for example in examples]
    kept = SnapshotReader(keep.files(numbers))
    assert all(map(same, examples, [kept.example(number) for number in kept.state]))


def top_tokens(seed: int, tokens: int, kept: int) -> TopTokens:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, (tokens, kept))
    return TopTokens(
        random.integers(0, 99, tokens),
        random.integers(1, 4, tokens),
        random.integers(0, kept, tokens),
        random.random((tokens, kept), np.float32),
        lengths,
        random.integers(0, 1 << 20, int(lengths.sum())),
    )


@pytest.mark.parametrize("others", [(), (SoftTarget(3, 0, (1,), (1 / 3,), (1 / 3,), 2 / 3),)], ids=["narrow", "double"])
def test_stored_tokens_come_back_as_they_were(others: tuple[SoftTarget, ...]):
    span = OffPolicySpan(5, (1, 2), (top_tokens(2, 2, 5),))
    soft_targets = (*others, top_tokens(0, 4, 5), *others, top_tokens(1, 1, 3))
    example = TrainingExample(7, "t", (1, 2, 3), soft_targets, (), (2,), 4, (span,))
    keep = SnapshotWriter()
    number = keep.example(example)
    found = SnapshotReader(keep.files(number)).example(number)
    both = zip(
        (*example.soft_targets, *span.soft_targets), (*found.soft_targets, *found.branches[0].soft_targets), strict=True
    )
    for one, other in both:
        if isinstance(one, SoftTarget):
            assert one == other
            continue
        for values, again in zip(vars(one).values(), vars(other).values(), strict=True):
            assert np.array_equal(values, again)
        assert other.probs.dtype == np.float32


@pytest.mark.parametrize("size", [256, 3])
def test_states_come_back_as_they_were(size: int):
    states = np.random.default_rng(0).integers(-127, 128, (5, size), np.int8)
    examples = [TrainingExample(0, "t", (1,), (), (), (), 0, (), own, 2**63) for own in (states, None, states[:1])]
    row = SequenceState(3, "a", "docs", "text", [1, 2], 1, [5], SeededRandomSource(0, 3), 7)
    row.target_state = torch.from_numpy(states[0])
    keep = SnapshotWriter()
    keep.row(row)
    kept = SnapshotReader(keep.files([keep.example(example) for example in examples]))
    for number, example in zip(kept.state, examples, strict=True):
        assert np.array_equal(kept.example(number).states, example.states)
        assert kept.example(number).scope == example.scope
    assert torch.equal(kept.row(0).target_state, row.target_state)


def take(weights: list[torch.Tensor], before: SnapshotWriter | None = None) -> tuple[SnapshotWriter, list[int]]:
    keep = SnapshotWriter(weights_before=before.weights if before else ())
    return keep, [keep.tensor(torch.zeros(2)), *map(keep.weight, weights)]


def test_weights_that_did_not_change_are_not_written_again():
    weights = [torch.randn(3, 4), torch.randn(5)]
    first, state = take(weights)
    files = first.files(state)
    second, again = take(weights, first)
    assert (first.kept_files, second.kept_files) == (frozenset(), {WEIGHTS})
    assert second.files(again).keys() == files.keys() - {WEIGHTS}
    reader = SnapshotReader({**second.files(again), WEIGHTS: files[WEIGHTS]})
    found = [reader.tensor(number) for number in reader.state[1:]]
    assert all(map(torch.equal, weights, found))


@pytest.mark.parametrize("change", ["value", "type", "more", "fewer", "not a number"])
def test_weights_that_changed_are_written(change):
    weights = [torch.tensor([1.0, torch.nan if change == "not a number" else 2.0]), torch.randn(5)]
    first, _ = take(weights)
    weights = {
        "value": [weights[0], weights[1] + 1],
        "type": [weights[0], weights[1].double()],
        "more": [*weights, torch.ones(1)],
        "fewer": weights[:1],
    }.get(change, weights)
    second, state = take(weights, first)
    reader = SnapshotReader(second.files(state))
    found = [reader.tensor(number) for number in reader.state[1:]]
    assert second.kept_files == frozenset()
    assert [one.dtype for one in found] == [one.dtype for one in weights]
    assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in zip(weights, found, strict=True))


def test_weights_of_a_snapshot_are_copies():
    weight = torch.zeros(3)
    first, _ = take([weight])
    weight += 1
    assert not first.weights[0].any()
    assert take([weight], first)[0].kept_files == frozenset()


def test_what_was_one_object_is_one_again():
    example = TrainingExample(0, "t", (1,), (), (), ())
    row = SequenceState(3, "a", "docs", "text", [1, 2], 1, [5], SeededRandomSource(0, 3), 7)
    keep = SnapshotWriter()
    state = [keep.example(example), keep.row(row), keep.example(example), keep.row(row)]
    kept = SnapshotReader(keep.files(state))
    assert kept.example(state[0]) is kept.example(state[2])
    assert kept.row(state[1]) is kept.row(state[3])


def test_a_row_continues_with_its_own_numbers():
    rng, distribution = SeededRandomSource(5, 3), torch.ones(2)
    row = SequenceState(3, "a", "docs", "text", [1, 2], 1, [5], rng, 7, block=4)
    for _ in range(11):
        rng.uniform(distribution)
    keep = SnapshotWriter()
    state = keep.row(row)
    row.tokens.append(9)  # later than the snapshot
    again = SnapshotReader(keep.files(state)).row(0)
    assert (again.tokens, again.pieces, again.remaining_tokens, again.block, again.text) == ([1, 2], [5], 7, 4, "text")
    assert [again.rng.uniform(distribution) for _ in range(3)] == [rng.uniform(distribution) for _ in range(3)]


@pytest.mark.parametrize("sampling", [None, SamplingParams(), SamplingParams(0.7, 3, 0.9, logprobs=2)])
def test_what_a_row_requests_comes_back(sampling: SamplingParams | None):
    row = SequenceState(3, "a", "docs", "text", [1, 2], 1, [5], SeededRandomSource(0, 3), 7, sampling=sampling)
    keep = SnapshotWriter()
    again = SnapshotReader(keep.files(keep.row(row))).row(0)
    assert (again.sampling, again.private, again.stop_strings) == (sampling, False, None)
    assert again.record_example
    row.record_example = False  # as for most prompts where updates of the drafter are far apart
    keep = SnapshotWriter()
    assert not SnapshotReader(keep.files(keep.row(row))).row(0).record_example


def test_rows_of_a_release_that_knew_no_wishes_are_read():
    keep = SnapshotWriter()
    keep.row(SequenceState(3, "a", "docs", "text", [1, 2], 1, [5], SeededRandomSource(0, 3), 7))
    files = keep.files(0)
    value = json.loads(files[STATE])
    for name in ("sampling", "record_example"):
        del value["rows"][0][name]
    again = SnapshotReader({**files, STATE: json.dumps(value).encode()}).row(0)
    assert (again.sampling, again.tokens, again.record_example) == (None, [1, 2], True)


def test_rows_that_are_not_to_be_kept_are_refused_and_never_written():
    row = SequenceState(3, "a", "docs", "text", [1, 2], 1, [5], SeededRandomSource(0, 3), 7)
    private, stopping = replace(row, private=True), replace(row, stop_strings=StopStrings([].__getitem__, ["end"]))
    assert [SnapshotWriter(rows=rows).includes(one) for rows in (True, False) for one in (row, private)] == [
        True, False, False, False,
    ]  # fmt: skip
    penalised = replace(row, transforms=SamplingParams(presence_penalty=1).make_transforms([1]))
    for keep, one in (
        (SnapshotWriter(rows=False), row), (SnapshotWriter(), private), (SnapshotWriter(), stopping),
        (SnapshotWriter(), penalised), (SnapshotWriter(), replace(row, sampling=SamplingParams(stop_token_ids=(1,)))),
        (SnapshotWriter(), replace(row, sampling=SamplingParams(ignore_eos=True))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must be kept and have no wishes of a request"):
            keep.row(one)
        assert json.loads(keep.files(None)[STATE])["rows"] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_tensor_is_kept_as_it_was_at_that_moment(dtype: torch.dtype):
    tensor = torch.arange(6).to(dtype).view(2, 3)
    keep = SnapshotWriter()
    number = keep.tensor(tensor.t())
    before = tensor.clone()
    tensor.zero_()
    again = SnapshotReader(keep.files(None)).tensor(number)
    assert again.dtype == dtype
    assert torch.equal(again, before.t())


def test_what_several_share_is_saved_and_restored_once():
    shared, saved, restored = object(), [], []
    keep = SnapshotWriter()

    def save() -> str:
        saved.append(1)
        return "state"

    state = [keep.save_shared(shared, save), keep.save_shared(shared, save)]
    kept = SnapshotReader(keep.files(state))
    for number in kept.state:
        kept.restore_shared(number, restored.append)
    assert (len(saved), restored) == (1, ["state"])


def test_an_optimiser_continues_unchanged():
    def train(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            (weight**3).sum().backward()
            optimizer.step()
        return weight.detach().clone()

    first = torch.nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.AdamW([first], lr=0.1)
    before = train(first, optimizer, 3)
    keep = SnapshotWriter()
    kept = SnapshotReader(keep.files(save_moments(optimizer.state_dict(), keep.tensor)))
    second = torch.nn.Parameter(before)
    other = torch.optim.AdamW([second], lr=0.1)
    other.load_state_dict(restore_moments(kept.state, other, kept))
    assert torch.equal(train(first, optimizer, 2), train(second, other, 2))


@dataclass(frozen=True)
class Generator:
    random: RandomState


def test_a_random_generator_continues():
    random = Random(3)
    random.random()
    keep = SnapshotWriter()
    kept = SnapshotReader(keep.files(Generator(random.getstate())))
    other = Random()
    other.setstate(kept.decode(Generator, kept.state).random)
    assert [other.random() for _ in range(5)] == [random.random() for _ in range(5)]


@pytest.mark.parametrize("name", [STATE, TENSORS])
@pytest.mark.parametrize("content", [None, b"", b'{"format": 99}'])
def test_files_that_are_no_snapshot_are_called_corrupt(name: str, content: bytes | None):
    files = SnapshotWriter().files(None)
    if content is None:
        del files[name]
    else:
        files[name] = content
    with pytest.raises(CorruptError):
        SnapshotReader(files)
