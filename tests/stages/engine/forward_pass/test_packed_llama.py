"""The packed forward against the model's own modules, over the architectures that it is written for."""

from pathlib import Path

import pytest
import torch
from doubles import row_of
from tiny_models import LLAMA3, make_disturbed
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.forward_pass.packed_llama import SHARED_QUERIES, PackedLlamaForward
from stages.engine.models.language_model import LanguageModel

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "a key head each": LlamaConfig(**{**BASE, "num_key_value_heads": 4}),
    "one key head": LlamaConfig(**{**BASE, "num_key_value_heads": 1}),
    "biases and tied weights": LlamaConfig(**BASE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "heads of their own size": LlamaConfig(**BASE, head_dim=16),
    "llama3 positions": LlamaConfig(**BASE, rope_scaling=LLAMA3),
    "linear positions": LlamaConfig(**BASE, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "mistral": MistralConfig(**BASE, sliding_window=None),
    "qwen2": Qwen2Config(**BASE),
    "qwen3": Qwen3Config(**BASE, head_dim=16),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}  # of the logits' standard deviation


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some tests change what a model computes: no outcome of a proof may outlive its test."""
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))


def model_of(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return LanguageModel(make_disturbed(config).to(dtype), "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_modules_for_ragged_rows(name: str, dtype: torch.dtype):
    model = model_of(CONFIGS[name], dtype)
    assert isinstance(model.forward_pass, PackedLlamaForward)
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 97, (count,), generator=generator).tolist()

    rows = [row_of(tokens(length), remaining_tokens=4) for length in (1, 7, 12)]
    for row in rows:
        model.admit(row, row.tokens)
    read = [row.tokens[:-1] for row in rows]
    for counts in ([1, 1, 1], [3, 2, 1], [1, 0, 2], [2, 2, 2], [0, SHARED_QUERIES + 1, 1]):
        fed = [tokens(count) for count in counts]
        logits_NV, _ = model.forward(rows, fed, counts)
        read = [before + new for before, new in zip(read, fed, strict=True)]
        for own_QV, text in zip(logits_NV.split(counts), read, strict=True):
            if len(own_QV):
                with torch.no_grad():
                    want_TV = model.model(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
                error = (own_QV.float() - want_TV[-len(own_QV) :]).abs().max() / want_TV.std()
                assert float(error) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_positions_that_depend_on_the_length_are_left_to_the_modules(kind: str):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    assert isinstance(model_of(LlamaConfig(**BASE, rope_scaling=scaling)).forward_pass, ModuleForward)


def test_a_packed_forward_that_computes_something_else_is_not_used_nor_handed_on():
    model = model_of(CONFIGS["qwen2"])
    assert isinstance(model.forward_pass, PackedLlamaForward)
    model.forward_pass.weights.eps = torch.tensor(0.5)  # as if the modules computed something slightly different
    model.prove_forward()
    assert isinstance(model.forward_pass, ModuleForward)
    assert isinstance(model.share_weights().forward_pass, ModuleForward)


def test_a_sound_packed_forward_is_shared():
    model = model_of(CONFIGS["qwen2"])
    model.prove_forward()
    sharing = model.share_weights()
    assert isinstance(model.forward_pass, PackedLlamaForward)
    assert isinstance(sharing.forward_pass, PackedLlamaForward)
    assert sharing.forward_pass.weights is model.forward_pass.weights


def test_a_restriction_replaces_the_one_before():
    model, row = model_of(CONFIGS["one key head"]), row_of([1, 2, 3])
    model.admit(row, row.tokens)

    def finite() -> set[int]:
        logits_NV, _ = model.forward([row], [[3]], [1])
        model.roll_back(row, 2)
        return set(torch.isfinite(logits_NV[0]).nonzero().flatten().tolist())

    whole_NV, _ = model.forward([row], [[3]], [1])
    model.roll_back(row, 2)
    for ids in ({1, 2, 3}, {4, 5, 6}, {7}, set(), set(range(97))):
        model.restrict(ids)
        assert finite() == ids
    assert torch.equal(model.forward([row], [[3]], [1])[0], whole_NV)


def test_nothing_wanted_is_no_logits():
    model, row = model_of(CONFIGS["qwen3"]), row_of([1, 2, 3])
    model.admit(row, row.tokens)
    assert model.forward([row], [[4]], [0])[0].shape == (0, 97)
