"""Padding: a larger model with the small one's outputs, in memory and from its folder."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from places import ROOT

from benchmarks.pad import SILENT, Widths, largest_difference, pad_model, widths_for, write_padded
from pipeline.models import catalog as zoo
from stages.engine.models.huggingface import load_causal_model, load_tokenizer, new_llama
from store.errors import ModelError

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-2,  # so large that a wrong one shows
}
WIDTHS = Widths(hidden=60, layers=5, mlp=128)
IDS = [1, 7, 30, 2, 49, 7, 7, 12]
TARGETS = [name for name, model in zoo.ZOO.items() if (zoo.MODELS_FOLDER / name / "model.safetensors").is_file()]
SHARED = ROOT.parent / "shared" / "models" / "target-16m"
TARGET_SOURCES = [
    *(pytest.param(str(zoo.MODELS_FOLDER / name), id=name) for name in TARGETS if zoo.ZOO[name].role == "target"),
    pytest.param(
        str(SHARED),
        id="target-16m",
        marks=pytest.mark.skipif(not SHARED.is_dir(), reason="the shared model is not next to this checkout"),
    ),
]


def small_llama(*, tied: bool):
    model = new_llama(3, tie_word_embeddings=tied, **SHAPE).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8).add_(torch.rand_like(weight), alpha=0.1)  # norm weights differ too
    return model


def greedy(model, number: int) -> list[int]:
    ids = torch.tensor([IDS])
    return model.generate(ids, do_sample=False, max_new_tokens=number, min_new_tokens=number)[0].tolist()


@pytest.mark.parametrize("tied", [True, False])
def test_a_padded_model_has_the_outputs_of_the_small_one(tied: bool):
    small = small_llama(tied=tied)
    before = {name: weight.clone() for name, weight in small.named_parameters()}
    large = pad_model(small, WIDTHS, seed=1)
    assert largest_difference(small, large, IDS) < 1e-5
    assert greedy(large, 40) == greedy(small, 40)
    assert len(set(greedy(small, 40))) > 5, "a text that is not a repetition"
    assert all(torch.equal(weight, before[name]) for name, weight in small.named_parameters())


def test_a_padded_model_has_the_requested_shape():
    large = pad_model(small_llama(tied=True), WIDTHS, seed=1)
    assert [layer.mlp.up_proj.weight.shape for layer in large.model.layers] == [(128, 60)] * 5
    assert large.model.layers[0].self_attn.q_proj.weight.shape == (60, 60)
    assert large.model.layers[0].self_attn.k_proj.weight.shape == (30, 60)
    assert large.config.tie_word_embeddings


def test_what_reads_is_of_usual_scale_and_what_writes_is_silent():
    small = small_llama(tied=True)
    large = pad_model(small, WIDTHS, seed=1)
    usual = large.config.initializer_range
    for layer in large.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for reader in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            assert reader.weight[:, 24:].std().item() == pytest.approx(usual, rel=0.2)
            assert reader.weight[-6:, 24:].std().item() == pytest.approx(usual, rel=0.5)
        written = [attention.o_proj.weight[24:], attention.o_proj.weight[:, 24:], mlp.down_proj.weight[:, 40:]]
        assert all(0 < weight.abs().max() < usual * SILENT * 6 for weight in written)
        assert all(weight.abs().mean() > 1e-30 for weight in written), "far from denormal"
    silent = [layer for layer in large.model.layers if layer.mlp.down_proj.weight.abs().max() < 1e-9]
    assert len(silent) == WIDTHS.layers - SHAPE["num_hidden_layers"]


def test_no_two_matrices_are_equal():
    """An engine that keeps equal weights once would read less than a dense model of that shape."""
    large = pad_model(small_llama(tied=True), WIDTHS, seed=1)
    matrices = [weight for weight in large.parameters() if weight.dim() == 2]
    assert len({weight.detach().numpy().tobytes() for weight in matrices}) == len(matrices)


def test_the_seed_decides():
    one, again, other = (pad_model(small_llama(tied=True), WIDTHS, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("wrong", [{"hidden": 12}, {"layers": 1}, {"mlp": 39}, {"hidden": 64}])
def test_a_shape_that_does_not_fit_is_refused(wrong: dict[str, int]):
    with pytest.raises(ModelError, match=r"set more parameters|a multiple of 12"):
        pad_model(small_llama(tied=True), replace(WIDTHS, **wrong), seed=1)


def test_a_llama_with_biases_is_refused():
    biased = new_llama(0, attention_bias=True, **SHAPE)
    with pytest.raises(ModelError, match="without biases"):
        pad_model(biased, WIDTHS, seed=1)
    with pytest.raises(ModelError, match="without biases"):
        widths_for(100_000_000, biased.config)


@pytest.mark.parametrize("source", TARGET_SOURCES)
@pytest.mark.parametrize("millions", [100, 300, 1000])
def test_a_usual_shape_has_the_requested_parameters(source: str, millions: int):
    config = load_causal_model(source, "float32", "cpu").config
    widths = widths_for(millions * 1_000_000, config)
    with torch.device("meta"):
        large = pad_model(new_llama(0, **config.to_dict()), widths, seed=0)
    assert sum(weight.numel() for weight in large.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize("millions", [300, 1000])
def test_a_model_of_more_layers_than_usual_keeps_them(millions: int):
    config = new_llama(3, **{**SHAPE, "num_hidden_layers": 30}).config
    widths = widths_for(millions * 1_000_000, config)
    with torch.device("meta"):
        large = pad_model(new_llama(0, **config.to_dict()), widths, seed=0)
    assert widths.layers == 30
    assert sum(weight.numel() for weight in large.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("source", TARGET_SOURCES[:1])
def test_a_written_folder_loads_and_writes_the_same_text(source: str, tmp_path: Path):
    found = write_padded(source, tmp_path / "large", 60_000_000, "float32", seed=0)
    assert found.difference < 1e-4
    small, large = (load_causal_model(place, "auto", "cpu").float() for place in (source, str(tmp_path / "large")))
    assert sum(weight.numel() for weight in large.parameters()) == found.parameters
    words, own = load_tokenizer(str(tmp_path / "large")), load_tokenizer(source)
    assert words.get_vocab() == own.get_vocab()
    assert large.generation_config.eos_token_id == words.eos_token_id
    ids = own("Natalia sold 12 clips in April.", return_tensors="pt").input_ids
    texts = [model.generate(ids, do_sample=False, max_new_tokens=40)[0].tolist() for model in (small, large)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("source", TARGET_SOURCES[:1])
def test_half_the_bytes_differ_by_their_rounding(source: str, tmp_path: Path):
    found = write_padded(source, tmp_path, 60_000_000, "bfloat16", seed=0)
    assert 1e-6 < found.difference < 0.02
    assert load_causal_model(str(tmp_path), "auto", "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_type_without_room_for_silent_weights_is_refused(dtype: str, tmp_path: Path):
    with pytest.raises(ModelError, match=f"must be float32 or bfloat16, got '{dtype}'"):
        write_padded("nowhere", tmp_path, 1, dtype, seed=0)
    assert not list(tmp_path.iterdir())


def test_silent_weights_are_not_zero_in_the_narrow_type():
    large = pad_model(small_llama(tied=True), WIDTHS, seed=1).to(torch.bfloat16)
    silent = large.model.layers[1].mlp.down_proj.weight
    assert silent.abs().max() < 1e-9
    assert (silent != 0).float().mean() > 0.99


def test_heads_wider_than_the_model_need_enough_width():
    model = new_llama(0, **{**SHAPE, "head_dim": 12})
    with pytest.raises(ModelError, match="room for 4 heads of 12, a width of 24 has 2"):
        pad_model(model, replace(WIDTHS, hidden=24), seed=1)
