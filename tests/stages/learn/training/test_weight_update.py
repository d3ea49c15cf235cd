"""Learned weights are exported in one place and applied in another, to the last bit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.drafting.head import AcceptanceHead, piece_features
from stages.engine.models.language_model import LanguageModel
from stages.learn.training.weight_update import Weights, apply_weights, export_weights, read_weights, write_weights


def llama(seed: int, dtype: torch.dtype = torch.float32) -> LanguageModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=16, max_position_embeddings=64, **sizes)
    return LanguageModel(LlamaForCausalLM(config).to(dtype), "tiny")


def logits_of(model: LanguageModel) -> torch.Tensor:
    ids_1T = torch.tensor([[1, 4, 2, 9]])
    with torch.no_grad():
        return model.read(ids_1T)


def equal(one: Weights, other: Weights) -> bool:
    versions = (one.drafter_version, one.head_version) == (other.drafter_version, other.head_version)
    drafters = len(one.drafter) == len(other.drafter) and all(map(torch.equal, one.drafter, other.drafter))
    same_names = one.head.keys() == other.head.keys()
    return (
        versions and drafters and same_names and all(torch.equal(one.head[name], other.head[name]) for name in one.head)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_put_into_service_is_what_was_taken_out(dtype: torch.dtype):
    teacher, served = llama(1, dtype), llama(2, dtype)
    heads = AcceptanceHead(8, 1), AcceptanceHead(8, 2)
    with torch.no_grad():
        for number, weight in enumerate(heads[0].parameters()):
            weight.add_(0.1 + number)  # a fresh head gives the same outputs with every seed
    before = logits_of(served)
    apply_weights(export_weights(teacher, heads[0], 3, 5), served, heads[1])
    assert torch.equal(logits_of(served), logits_of(teacher))
    assert not torch.equal(logits_of(served), before)
    features_BF = piece_features(torch.randn(3, 8), torch.randn(3, 5), torch.tensor([0, 4, 2]), 1)
    assert torch.equal(heads[1](features_BF), heads[0](features_BF))


def test_rows_in_flight_are_read_on_with_the_new_weights():
    """Also with a packed forward, which has a copy of the weights in another layout."""
    from doubles import row_of

    teacher, served = llama(1), llama(2)
    row = row_of([1, 4, 2])
    for model in (teacher, served):
        model.prove_forward()
    served.admit(row, row.tokens)
    apply_weights(export_weights(teacher, AcceptanceHead(8, 1), 1, 1), served, AcceptanceHead(8, 1))
    served.release(row)
    for model in (teacher, served):
        model.admit(row, row.tokens)
    by_both = [model.forward([row], [row.tokens[-1:]], [1])[0] for model in (teacher, served)]
    assert torch.equal(*by_both)


tensors = st.integers(0, 1 << 30).map(
    lambda seed: torch.randn(2, 1 + seed % 3, generator=torch.Generator().manual_seed(seed))
)


@given(
    st.lists(tensors, max_size=12),
    st.dictionaries(st.sampled_from(["a", "b", "c.d"]), tensors, max_size=3),
    st.tuples(st.integers(0), st.integers(0)),
)
def test_a_file_of_weights_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    drafter: list[torch.Tensor],
    head: dict[str, torch.Tensor],
    versions: tuple[int, int],
):
    weights = Weights(tuple(drafter), head, *versions)
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    write_weights(weights, path)
    assert equal(read_weights(path), weights)
