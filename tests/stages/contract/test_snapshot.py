"""Snapshots give back what was kept: to the last bit, and as one object what was one object."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored_states import store

from stages.contract.blocks import SequenceState, TopTokens, TrainingExample
from stages.contract.snapshot import (
    STATE,
    TENSORS,
    WEIGHTS,
    RarelyChanged,
    Snapshot,
    moments_of,
    read_snapshot,
    with_moments,
)
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import SeededRandomSource
from stages.vocabulary.text_stream import StopStrings
from store.errors import CorruptError

ids = st.integers(0, 2**31 - 1)
numbers = st.lists(ids, max_size=5).map(tuple)


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


stored_tokens = st.builds(top_tokens, st.integers(0, 999), st.integers(0, 4), st.integers(1, 5))
examples = st.builds(
    TrainingExample, ids, st.text(max_size=5), numbers, st.none() | stored_tokens, st.just(()), numbers, ids
)


def values_of(one: object) -> object:
    """Examples are compared as objects; here by their values."""
    if isinstance(one, TrainingExample | TopTokens):
        return {name: values_of(value) for name, value in vars(one).items()}
    if isinstance(one, np.ndarray):
        return one.tolist(), one.shape
    return [values_of(part) for part in one] if isinstance(one, tuple) else one


@given(st.lists(examples, max_size=5))
def test_examples_come_back_as_they_were(made: list[TrainingExample]):
    found = store(made)
    assert values_of(tuple(found)) == values_of(tuple(made))
    assert all(one.soft_targets.probs.dtype == np.float32 for one in found if one.soft_targets)


@pytest.mark.parametrize("size", [256, 3])
def test_states_come_back_as_they_were(size: int):
    states = np.random.default_rng(0).integers(-127, 128, (5, size), np.int8)
    examples = [TrainingExample(0, "t", (1,), None, (), (), 0, own, 2**63) for own in (states, None, states[:1])]
    row = new_row(target_state=torch.from_numpy(states[0]))
    *found, again = store([*examples, row])
    for one, example in zip(found, examples, strict=True):
        assert np.array_equal(one.states, example.states)
        assert one.scope == example.scope
    assert torch.equal(again.target_state, row.target_state)


def new_row(**fields: Any) -> SequenceState:
    return SequenceState(3, "a", "docs", "text", [1, 2], 1, [5], SeededRandomSource(0, 3), 7, **fields)


def take(weights: list[torch.Tensor], before: Snapshot | None = None) -> Snapshot:
    return Snapshot([torch.zeros(2), RarelyChanged(weights)], before.weights if before else ())


def test_weights_that_did_not_change_are_not_written_again():
    weights = [torch.randn(3, 4), torch.randn(5)]
    first = take(weights)
    files = first.files()
    second = take(weights, first)
    assert (first.kept_files, second.kept_files) == (frozenset(), {WEIGHTS})
    assert second.files().keys() == files.keys() - {WEIGHTS}
    found = read_snapshot({**second.files(), WEIGHTS: files[WEIGHTS]})[1]
    assert all(map(torch.equal, weights, found))


@pytest.mark.parametrize("change", ["value", "type", "more", "fewer", "not a number"])
def test_weights_that_changed_are_written(change):
    weights = [torch.tensor([1.0, torch.nan if change == "not a number" else 2.0]), torch.randn(5)]
    first = take(weights)
    weights = {
        "value": [weights[0], weights[1] + 1],
        "type": [weights[0], weights[1].double()],
        "more": [*weights, torch.ones(1)],
        "fewer": weights[:1],
    }.get(change, weights)
    second = take(weights, first)
    found = read_snapshot(second.files())[1]
    assert second.kept_files == frozenset()
    assert [one.dtype for one in found] == [one.dtype for one in weights]
    assert all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in zip(weights, found, strict=True))


def test_a_row_continues_with_its_own_numbers():
    row, distribution = new_row(block=4), torch.ones(2)
    for _ in range(11):
        row.rng.uniform(distribution)
    snapshot = Snapshot([row])
    row.tokens.append(9)  # later than the snapshot
    (again,) = read_snapshot(snapshot.files())
    assert (again.tokens, again.pieces, again.remaining_tokens, again.block, again.text) == ([1, 2], [5], 7, 4, "text")
    assert [again.rng.uniform(distribution) for _ in range(3)] == [row.rng.uniform(distribution) for _ in range(3)]


@pytest.mark.parametrize("record_example", [True, False])  # not for most prompts, where updates are far apart
@pytest.mark.parametrize("sampling", [None, SamplingParams(), SamplingParams(0.7, 3, 0.9, logprobs=2)])
def test_what_a_row_requests_comes_back(sampling: SamplingParams | None, record_example: bool):
    (again,) = store([new_row(sampling=sampling, record_example=record_example)])
    assert (again.sampling, again.private, again.stop_strings) == (sampling, False, None)
    assert again.record_example == record_example


@pytest.mark.parametrize(
    "fields",
    [
        {"private": True},
        {"stop_strings": StopStrings([].__getitem__, ["end"])},
        {"transforms": SamplingParams(presence_penalty=1).make_transforms([1])},
        {"sampling": SamplingParams(stop_token_ids=(1,))},
        {"sampling": SamplingParams(ignore_eos=True)},
    ],
)
def test_rows_that_must_not_be_kept_are_refused(fields: dict[str, Any]):
    with pytest.raises(ValueError, match="must be neither private nor have wishes of a request"):
        Snapshot([new_row(**fields)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_tensor_is_kept_as_it_was_at_that_moment(dtype: torch.dtype):
    tensor = torch.arange(6).to(dtype).view(2, 3)
    snapshot, before = Snapshot([tensor.t()]), tensor.clone()
    tensor.zero_()
    (again,) = read_snapshot(snapshot.files())
    assert again.dtype == dtype
    assert torch.equal(again, before.t())


class Shared:
    """An object that several owners share, with one that these share again."""

    def __init__(self, inner: "Shared | None" = None) -> None:
        self.inner, self.saved = inner, 0

    def state_dict(self) -> Any:
        self.saved += 1
        return {"inner": self.inner, "weight": torch.ones(1)}


def test_what_several_share_is_saved_once():
    inner = Shared()
    outer = Shared(inner)
    found = store({"first": outer, "second": outer, "third": inner})
    assert (outer.saved, inner.saved) == (1, 1)
    assert found["first"] is found["second"]
    assert found["first"]["inner"] is found["third"]
    assert torch.equal(found["third"]["weight"], torch.ones(1))


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
    moments = store(moments_of(optimizer))
    second = torch.nn.Parameter(before)
    other = torch.optim.AdamW([second], lr=0.1)
    other.load_state_dict(with_moments(other, moments))
    assert torch.equal(train(first, optimizer, 2), train(second, other, 2))


@pytest.mark.parametrize("name", [STATE, TENSORS])
@pytest.mark.parametrize("content", [None, b"", b'{"format": 99}'])
def test_files_that_are_no_snapshot_are_called_corrupt(name: str, content: bytes | None):
    files = Snapshot({}).files()
    if content is None:
        del files[name]
    else:
        files[name] = content
    with pytest.raises(CorruptError):
        read_snapshot(files)
