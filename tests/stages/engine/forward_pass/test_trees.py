"""Trees of tokens: each node has the logits of its own path, and a kept path is as if nothing else had been read.

Models in double precision, so that the order of summation decides nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from doubles import row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_module
from torch import Tensor

from stages.contract.blocks import SequenceState
from stages.engine.forward_pass import proof
from stages.engine.forward_pass.attention_masks import make_tree_mask
from stages.engine.forward_pass.forward import ForwardBatch, find_paths, is_chain
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.forward_pass.packed_llama import PackedLlamaForward
from stages.engine.forward_pass.row_forward import Reading, RowForward
from stages.engine.models.language_model import LanguageModel

WINDOW = 8
SLIDING_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
# Parts of these are computed in float32: scores, routing.
ROUNDED = {"modules, chunks", "modules, eager"}
CHUNKS = {"attention_chunk_size": WINDOW, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48}
# Per case the model type, its settings, and the forward pass.
CASES: dict[str, tuple[str, dict[str, Any], type]] = {
    "packed, a key head each": ("llama", {"num_key_value_heads": 4}, PackedLlamaForward),
    "packed, shared key heads": ("llama", {}, PackedLlamaForward),
    "packed, window": ("mistral", {"sliding_window": WINDOW}, PackedLlamaForward),
    "packed, some layers slide": ("qwen2", SLIDING_QWEN, PackedLlamaForward),
    "modules": ("llama", {}, ModuleForward),
    "modules, windows": ("gemma3_text", {"sliding_window": WINDOW, "head_dim": 8}, ModuleForward),
    "modules, chunks": ("llama4_text", CHUNKS, ModuleForward),
    "modules, eager": ("gemma2", {"sliding_window": WINDOW, "head_dim": 8}, ModuleForward),
}
every_case = pytest.mark.parametrize("case", CASES)
FORWARDS = {"packed": "packed, some layers slide", "modules": "modules, windows"}

TREE = (-1, 0, 1, 1, 0, 4, -1, 6, 6)
DEEP = (*range(-1, 11), 3, 12, 13, 13)  # deeper than the windows, and branches within
CHAIN = (-1, 0, 1)
# Rows of a pass: widths that are padded to the longest, and widths that are computed row by row.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "alike": (TREE, (*CHAIN, 2, 3, 4, 5, 6), (), (-1, -1, 0, 1, 1, 2, -1)),
    "unlike": (DEEP, (-1,), (), (-1, -1)),
    "one chain of length 1": ((-1, -1, 0), (-1,), (-1, 0), (-1, -1, -1)),
}
LENGTHS = 21, 9, 14, 1  # of the prompts; of the last nothing is cached


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A proof is made in every test."""
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))


def make_model(case: str, dtype: torch.dtype = torch.float64) -> LanguageModel:
    kind, options, forward = CASES[case]
    module = make_module(kind, options, dtype)
    model = LanguageModel(module, case)
    if forward is ModuleForward:
        model.forward_pass = ModuleForward(module)
    assert isinstance(model.forward_pass, forward)
    model.reads_trees = True
    return model


def make_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Reader:
    """Reads trees in a batch, and the same paths alone as chains, and compares.

    Args:
        model: of which another instance reads the chains.
        texts: prompts; all of their tokens but the last are cached.
    """

    def __init__(self, model: LanguageModel, texts: Sequence[list[int]]) -> None:
        self.model = model
        double = model.model.dtype == torch.float64 and model.name not in ROUNDED
        self.tolerance = 1e-9 if double else 1e-4
        self.rows = [row_of(text, offset=number, remaining_tokens=64) for number, text in enumerate(texts)]
        self.cached = {row: text[:-1] for row, text in zip(self.rows, texts, strict=True)}
        self.new: dict[SequenceState, list[int]] = {}
        self._seed = 0
        for row, text in zip(self.rows, texts, strict=True):
            model.admit(row, text)

    def read(self, parents: Sequence[Sequence[int]]) -> None:
        """Read new tokens with these parents and compare the logits of every node."""
        self._seed += 1
        tokens = [make_tokens(len(own), 100 * self._seed + number) for number, own in enumerate(parents)]
        self.new = dict(zip(self.rows, tokens, strict=True))
        counts = list(map(len, tokens))
        logits_NV, hidden_NW = self.model.forward(self.rows, tokens, counts, hidden=True, parents=parents)
        split = zip(self.rows, parents, logits_NV.split(counts), hidden_NW.split(counts), strict=True)
        for row, own, logits_QV, hidden_QW in split:
            for node, path in enumerate(find_paths(own)):
                if node not in own:  # a leaf
                    chain = [self.new[row][ancestor] for ancestor in path]
                    alone_QV, alone_QW = read_alone(self.model, self.cached[row], chain)
                    self._check(logits_QV[path], alone_QV)
                    self._check(hidden_QW[path], alone_QW)

    def keep(self, row: SequenceState, path: Sequence[int]) -> None:
        self.model.keep_path(row, len(self.cached[row]), path)
        self.cached[row] = [*self.cached[row], *(self.new[row][node] for node in path)]
        assert self.model.length(row) == len(self.cached[row])

    def _check(self, found_QX: Tensor, expected_QX: Tensor) -> None:
        assert float((found_QX - expected_QX).abs().max() / expected_QX.std()) < self.tolerance


def read_alone(model: LanguageModel, cached: Sequence[int], chain: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The logits and the hidden states of a chain of tokens, in a cache of its own."""
    alone, row = model.share_weights(), row_of([*cached, 0], remaining_tokens=len(chain))
    alone.admit(row, row.tokens)
    return alone.forward([row], [chain], [len(chain)], hidden=True)


def texts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [make_tokens(length, 7 + number) for number, length in enumerate(lengths)]


@every_case
@pytest.mark.parametrize("shape", SHAPES)
def test_a_node_has_the_logits_of_its_path_alone(case: str, shape: str):
    Reader(make_model(case), texts_of(LENGTHS)).read(SHAPES[shape])


@every_case
def test_a_kept_path_is_as_if_nothing_else_had_been_read(case: str):
    reader = Reader(make_model(case), texts_of(LENGTHS))
    first, second, third, fourth = reader.rows
    reader.read((TREE, DEEP, CHAIN, (-1, -1, 0, 1, 1)))
    reader.keep(first, (0, 4, 5))
    reader.keep(second, (0, 1, 2, 3, 12, 13, 15))
    reader.keep(third, (0, 1))
    reader.keep(fourth, (1, 4))
    reader.read(((-1, 0), (-1, 0), (-1,), (-1, 0)))
    reader.keep(first, ())
    reader.keep(second, (0,))
    reader.keep(third, (0,))
    reader.keep(fourth, (0, 1))
    reader.read((CHAIN, TREE, (), TREE))


@every_case
def test_the_cache_of_a_kept_path_is_that_of_its_chain(case: str):
    model, row = make_model(case), row_of(make_tokens(12), remaining_tokens=64)
    model.admit(row, row.tokens)
    new = make_tokens(len(TREE), 3)
    model.forward([row], [new], [0], parents=[TREE])
    model.keep_path(row, 11, (0, 4, 5))
    alone, other = model.share_weights(), row_of(row.tokens, remaining_tokens=64)
    alone.admit(other, other.tokens)
    alone.forward([other], [[new[0], new[4], new[5]]], [0])
    pairs = zip(model.forward_pass.read_cache(0, 14), alone.forward_pass.read_cache(0, 14), strict=True)
    for kept, expected in pairs:
        torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_chains_with_parents_are_bit_identical_and_make_no_mask_of_trees(case: str, monkeypatch: pytest.MonkeyPatch):
    for module in ("packed_llama", "module_forward"):
        target = f"stages.engine.forward_pass.{module}.make_tree_mask"
        monkeypatch.setattr(target, lambda *_, **__: pytest.fail("a tree"))
    tokens = [make_tokens(count, count) for count in (5, 1, 0)]
    found = []
    for parents in (None, [range(-1, len(new) - 1) for new in tokens]):
        model, rows = make_model(case), [row_of(text, remaining_tokens=64) for text in texts_of((9, 21, 4))]
        model.reads_trees = False
        for row in rows:
            model.admit(row, row.tokens)
        found.append(model.forward(rows, tokens, list(map(len, tokens)), parents=parents)[0])
        model.keep_path(rows[0], 8, [0, 1])
        assert model.length(rows[0]) == 10
    assert torch.equal(*found)


@st.composite
def trees(draw: Callable[..., Any]) -> list[int]:
    count = draw(st.integers(0, 14))
    return [draw(st.integers(-1, token - 1)) for token in range(count)]


@pytest.fixture(scope="module", params=FORWARDS)
def any_model(request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_CACHE", "")
        yield make_model(FORWARDS[request.param])


@pytest.mark.slow
@settings(max_examples=12)
@given(
    blocks=st.lists(st.tuples(trees(), trees()), min_size=1, max_size=3),
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    choice=st.randoms(use_true_random=False),
)
def test_any_trees_and_any_kept_paths(any_model: LanguageModel, blocks, lengths, choice):
    reader = Reader(any_model.share_weights(), texts_of(lengths))
    for parents in blocks:
        if not any(parents):
            continue
        reader.read(parents)
        for row, own in zip(reader.rows, parents, strict=True):
            paths = find_paths(own)
            path = choice.choice(paths) if paths else []
            reader.keep(row, path[: choice.randint(0, len(path))])


def test_parents_must_fit_the_tokens():
    model, row = make_model("packed, window"), row_of([1, 2, 3], remaining_tokens=8)
    model.admit(row, row.tokens)
    for tokens, parents in (([4, 5], [-1]), ([4, 5], [-1, 1]), ([4, 5], [-2, 0]), ([4], [0])):
        with pytest.raises(ValueError, match=r"every new token needs a parent|must follow an earlier one"):
            model.forward([row], [tokens], [1], parents=[parents])
    assert model.length(row) == 2, "nothing was read"


def test_a_path_must_ascend_among_the_new_tokens():
    model, row = make_model("modules"), row_of([1, 2, 3], remaining_tokens=8)
    model.admit(row, row.tokens)
    model.forward([row], [[4, 5, 6]], [1], parents=[[-1, 0, 0]])
    for path in ([0, 3], [1, 0], [0, 0], [-1]):
        with pytest.raises(ValueError, match="a path must ascend among the 3 new tokens"):
            model.keep_path(row, 2, path)
    assert model.length(row) == 5


def test_a_model_that_is_not_proved_to_read_trees_refuses_them():
    model, row = make_model("packed, window"), row_of([1, 2, 3], remaining_tokens=8)
    model.reads_trees = False
    model.admit(row, row.tokens)
    with pytest.raises(ValueError, match=r"reads chains only, got the parents \[\[-1, -1\]\]"):
        model.forward([row], [[4, 5]], [1], parents=[[-1, -1]])
    assert model.length(row) == 2
    model.forward([row], [[4, 5]], [1], parents=[[-1, 0]])
    assert model.length(row) == 4


@pytest.mark.parametrize("reading", Reading)
def test_rows_by_themselves_read_chains_only(reading: Reading):
    forward = RowForward(make_model("modules").model, reading)
    assert not forward.reads_trees
    assert not forward.share().reads_trees
    forward.reserve(1, 16)
    with torch.inference_mode(), pytest.raises(ValueError, match="reads chains, not trees"):
        forward(ForwardBatch(0, [[1, 2, 3]], [0], [1], parents=[[-1, 0, 0]]))
    with torch.inference_mode():
        forward(ForwardBatch(0, [[1, 2, 3]], [0], [1], parents=[[-1, 0, 1]]))
    forward.keep(0, 0, [0, 1])
    with pytest.raises(ValueError, match="reads chains, whose paths are their first tokens"):
        forward.keep(0, 0, [0, 2])


@every_case
def test_the_proof_finds_that_trees_are_read_and_copies_inherit_it(case: str):
    model = make_model(case, torch.float32)
    model.reads_trees = False
    model.prove_forward()
    assert model.reads_trees
    assert model.share_weights().reads_trees
    assert model.forward_pass.share().reads_trees
    again = make_model(case, torch.float32)
    again.reads_trees = False
    again.prove_forward()
    assert again.reads_trees, "from the stored outcome"


NOT_FOLLOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "biases by column": ("bloom", {}),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
}


@pytest.mark.parametrize("kind", NOT_FOLLOWED)
def test_a_model_that_does_not_follow_positions_reads_chains_only(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CASES, kind, (*NOT_FOLLOWED[kind], ModuleForward))
    model = make_model(kind, torch.float32)
    model.prove_forward()
    assert not model.reads_trees


def _show_everything(starts: Any, paths: Any, keys: range, device: Any, **_: Any) -> Tensor:
    return torch.ones(len(paths), max(map(len, paths)), len(keys), dtype=torch.bool)


def _fail(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("no trees here")


@pytest.mark.parametrize("make_mask", [_show_everything, _fail])
@pytest.mark.parametrize("case", FORWARDS.values())
def test_a_wrong_mask_is_found_and_chains_still_work(case: str, make_mask: Any, monkeypatch: pytest.MonkeyPatch):
    module = "packed_llama" if case.startswith("packed") else "module_forward"
    monkeypatch.setattr(f"stages.engine.forward_pass.{module}.make_tree_mask", make_mask)
    model = make_model(case, torch.float32)
    forward = type(model.forward_pass)
    model.prove_forward()
    assert not model.reads_trees
    assert isinstance(model.forward_pass, forward), "the forward pass is right for chains"
    row = row_of([1, 2, 3], remaining_tokens=8)
    model.admit(row, row.tokens)
    assert model.forward([row], [[4, 5]], [2])[0].isfinite().all()


@pytest.mark.parametrize(
    ("case", "holder"), [(FORWARDS["packed"], PackedLlamaForward), (FORWARDS["modules"], ModuleForward)]
)
def test_a_path_that_is_not_kept_is_found(case: str, holder: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(holder, "keep", lambda *_: None)
    model = make_model(case, torch.float32)
    model.prove_forward()
    assert not model.reads_trees


def test_a_lack_of_memory_is_no_outcome(monkeypatch: pytest.MonkeyPatch):
    fail = Mock(side_effect=torch.OutOfMemoryError("no memory left"))
    monkeypatch.setattr("stages.engine.forward_pass.packed_llama.make_tree_mask", fail)
    with pytest.raises(torch.OutOfMemoryError):
        make_model("packed, window").prove_forward()


def test_the_tree_of_the_proof_branches_twice_and_its_kept_path_is_one():
    assert not is_chain(proof.TREE)
    assert find_paths(proof.TREE)[proof.KEPT[-1]] == list(proof.KEPT)
    assert len(proof.TREE) > proof.SPAN, "a window by slot would be found"


@pytest.mark.parametrize("left", [False, True])
def test_no_query_attends_to_nothing_and_none_beyond_its_window(left: bool):
    paths = [find_paths(TREE), find_paths(CHAIN), []]
    mask_BQK = make_tree_mask([9, 7, 12], paths, range(4, 19), torch.device("cpu"), window=4, left=left)
    padding_BQ = torch.tensor([[query >= len(own) for query in range(len(TREE))] for own in paths])
    padding_BQ = padding_BQ.flip(1) if left else padding_BQ
    assert mask_BQK[padding_BQ, 0].all()
    assert mask_BQK[~padding_BQ].sum(-1).max() == 4
