"""The compiled forward against the model's own modules: architectures, trees, windows, and the bits of a token."""

from pathlib import Path

import pytest
import torch
from doubles import read_in_steps, row_of
from emulation import PROCESSORS, EmulatedSteps
from tiny_models import LLAMA3, make_disturbed
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from stages.engine.compiled import program
from stages.engine.compiled.llama_forward import CompiledLlamaForward
from stages.engine.compiled.llama_weights import SMALL, has_compiled_forward, prefers_compiled_forward
from stages.engine.compiled.llvm.machine import Features
from stages.engine.forward_pass.packed_llama import PackedLlamaForward
from stages.engine.forward_pass.proof import (
    EXACT,
    ROUNDED_IN_8_BITS,
    ROUNDED_IN_16_BITS,
    check_forward,
)
from stages.engine.models.forward_choice import choose_weights
from stages.engine.models.language_model import LanguageModel
from stages.engine.quantisation.groups import GroupedMatrix
from stages.engine.quantisation.modules import ROUNDING, attach_groups
from store.errors import ModelError

BASE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
GEMMA = {
    **BASE,
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA3_POSITIONS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 6.0,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
PHI3 = {**BASE, "pad_token_id": 0, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS: dict[str, PretrainedConfig] = {
    "a key head each": LlamaConfig(**{**BASE, "num_key_value_heads": 4}),
    "one key head": LlamaConfig(**{**BASE, "num_key_value_heads": 1}),
    "biases and tied weights": LlamaConfig(**BASE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "heads of their own size": LlamaConfig(**BASE, head_dim=48),
    "llama3 positions": LlamaConfig(**BASE, rope_scaling=LLAMA3),
    "window": MistralConfig(**BASE, sliding_window=8),
    "some layers slide": Qwen2Config(**BASE, **SLIDING),
    "qwen3": Qwen3Config(**BASE, head_dim=32),
    "gemma": GemmaConfig(**BASE, head_dim=32),
    "gemma2": Gemma2Config(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**GEMMA, rope_parameters=GEMMA3_POSITIONS),
    "gemma3, all layers attend to all": Gemma3TextConfig(**{**GEMMA, "layer_types": ["full_attention"] * 2}),
    "granite": GraniteConfig(**BASE, **GRANITE),
    "granite, biases": GraniteConfig(**BASE, **GRANITE, attention_bias=True, mlp_bias=True),
    "phi3": Phi3Config(**PHI3, sliding_window=None),
    "phi3, partial rotation and a window": Phi3Config(**PHI3, rope_parameters=PARTIAL, sliding_window=8),
    "olmo2": Olmo2Config(**BASE),
    "olmo3": Olmo3Config(**BASE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}
FAMILIES = ("one key head", "gemma2", "gemma3", "granite", "phi3, partial rotation and a window", "olmo2")
WEIGHTS = ("fastest", "codes", "codes8")
TEXT = [(5 + 31 * place) % 97 for place in range(60)]


def model_of(config: PretrainedConfig, weights: str = "fastest", *, codes: int = 0) -> LanguageModel:
    """Random weights, norms and biases too; with codes, every matrix has them and is what they stand for."""
    model = make_disturbed(config)
    with torch.no_grad():
        for linear in [one for one in model.modules() if isinstance(one, torch.nn.Linear)] if codes else ():
            groups = GroupedMatrix.quantise(linear.weight)
            linear.weight.data = groups.dequantise()
            attach_groups(linear, groups)
    return LanguageModel(model, "tiny", weights=weights)


@pytest.mark.representatives(*(f"{4 * (number % 2)}-{name}" for number, name in enumerate(CONFIGS)))
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("codes", [0, 4])
def test_it_computes_what_the_modules_compute(name: str, codes: int):
    model = model_of(CONFIGS[name], codes=codes)
    forward = model.forward_pass
    assert isinstance(forward, CompiledLlamaForward)
    deviation, follows_trees = check_forward(model.model, forward.share, EXACT, 60)
    assert deviation < EXACT
    assert follows_trees


@pytest.mark.representatives(4)
@pytest.mark.parametrize("name", ["window", *FAMILIES])
@pytest.mark.parametrize(
    ("weights", "least", "most"),
    [("auto", 1e-7, ROUNDED_IN_16_BITS / 10), ("codes8", ROUNDED_IN_16_BITS / 10, ROUNDED_IN_8_BITS / 2)],
    ids=["codes", "codes8"],
)
def test_with_rounded_inputs_it_is_nearly_that(name: str, weights: str, least: float, most: float):
    model = model_of(CONFIGS[name], weights, codes=4)
    assert model.weights == ("codes" if weights == "auto" else weights)
    deviation, _ = check_forward(model.model, model.forward_pass.share, most, 60, rounds_inputs=True)
    assert least < deviation < most
    model.prove_forward()
    assert isinstance(model.forward_pass, CompiledLlamaForward)
    assert model.reads_trees


@pytest.mark.representatives(*(f"{WEIGHTS[number % 3]}-{name}" for number, name in enumerate(FAMILIES)))
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_token_has_the_same_bits_whatever_is_computed_with_it(name: str, weights: str):
    """Alone, in parts of any size, in a batch of ragged rows, and as a node of a tree."""
    model = model_of(CONFIGS[name], weights, codes=4)
    model.prove_forward()
    assert isinstance(model.forward_pass, CompiledLlamaForward)
    alone_TV = read_in_steps(model, TEXT, 1)
    for step in (2, 5, 7, 60):
        assert torch.equal(read_in_steps(model, TEXT, step), alone_TV)
    rows = [row_of(TEXT[:1], remaining_tokens=99) for _ in range(3)]
    for row in rows:
        model.admit(row, row.tokens)
    others = [[9, 8, 7], TEXT[:20], [1]]
    logits_NV, _ = model.forward(rows, others, list(map(len, others)))
    assert torch.equal(logits_NV[3:23], alone_TV[:20])
    # After 20 tokens a tree: a wrong branch of two first, then the text's own three.
    tokens = [[], [5, 6, *TEXT[20:23]], []]
    parents = [[], [-1, 0, -1, 2, 3], []]
    logits_NV, _ = model.forward(rows, tokens, [0, 5, 0], parents=parents)
    assert torch.equal(logits_NV[2:], alone_TV[20:23])
    model.keep_path(rows[1], 20, [2, 3, 4])
    logits_NV, _ = model.forward(rows, [[3], TEXT[23:30], []], [1, 7, 0])
    assert torch.equal(logits_NV[1:], alone_TV[23:30])


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_aarch64_computes_the_same_bits(name: str, weights: str, monkeypatch: pytest.MonkeyPatch):
    text = TEXT[:24]
    expected_TV = read_in_steps(model_of(CONFIGS[name], weights, codes=4), text, 9)
    monkeypatch.setattr(Features, "detect", lambda: next(iter(PROCESSORS)))
    monkeypatch.setattr("stages.engine.compiled.llama_weights.compile_steps", EmulatedSteps)
    assert torch.equal(read_in_steps(model_of(CONFIGS[name], weights, codes=4), text, 9), expected_TV)


def test_a_restricted_output_layer_computes_its_ids_alone():
    model = model_of(CONFIGS["one key head"], codes=4)
    full_TV = read_in_steps(model, TEXT[:9], 9)
    kept = [3, 4, 50, 96]
    model.restrict(kept)
    found_TV = read_in_steps(model, TEXT[:9], 9)
    assert torch.equal(found_TV[:, kept], full_TV[:, kept])
    assert int(found_TV.isfinite().sum()) == 9 * len(kept)


def test_the_last_row_takes_the_place_of_another_without_a_copy():
    model = model_of(CONFIGS["one key head"], codes=4)
    texts = [TEXT[:9], TEXT[9:14], TEXT[3:20]]
    alone = [read_in_steps(model, text, 4) for text in texts]
    rows = [row_of(text, offset=number) for number, text in enumerate(texts)]
    for row, text in zip(rows, texts, strict=True):
        model.admit(row, text)
    addresses = [tensor.data_ptr() for tensor in model.read_row(rows[2])]
    model.release(rows[0])
    assert [tensor.data_ptr() for tensor in model.read_row(rows[2])] == addresses
    logits_NV, _ = model.forward([rows[2], rows[1]], [texts[2][-1:], texts[1][-1:]], [1, 1])
    assert torch.equal(logits_NV, torch.stack([alone[2][-1], alone[1][-1]]))
    late = row_of(TEXT[:9], offset=3)  # in the slots of the released row
    model.admit(late, late.tokens)
    assert torch.equal(model.forward([rows[2], rows[1], late], [(), (), TEXT[8:9]], [0, 0, 1])[0][0], alone[0][-1])


def test_changed_weights_are_taken_over():
    """Holds where they leave the values of bfloat16, or those of the codes."""
    for codes in (0, 4):
        model = model_of(CONFIGS["qwen3"], codes=codes)
        before_TV = read_in_steps(model, TEXT, 9)
        model.load_weights([weight + 0.01 * torch.randn_like(weight) for weight in model.trained_weights])
        after_TV = read_in_steps(model, TEXT, 9)
        assert not torch.equal(before_TV, after_TV)
        with torch.no_grad():
            expected_TV = model.model(torch.tensor([TEXT])).logits[0]
        assert float((after_TV - expected_TV).abs().max() / expected_TV.std()) < EXACT


@pytest.mark.parametrize(("weights", "error"), [("fastest", 1e-4), ("codes", 1e-3), ("codes8", 0.2)])
def test_hidden_states_are_the_inputs_of_the_output_layer(weights: str, error: float):
    model = model_of(CONFIGS["llama3 positions"], weights, codes=4)
    row = row_of(TEXT[:1], remaining_tokens=99)
    model.admit(row, row.tokens)
    logits_NV, none_NW = model.forward([row], [TEXT[:4]], [0], hidden=True)
    assert (len(logits_NV), none_NW.shape[0]) == (0, 0), "a part of a prompt that is read in several passes"
    _, hidden_NW = model.forward([row], [TEXT[4:8]], [3], hidden=True)
    with torch.no_grad():
        expected_TW = model.model.model(torch.tensor([TEXT[:8]])).last_hidden_state[0]
    assert torch.allclose(hidden_NW, expected_TW[-3:], atol=error)


def test_models_that_it_does_not_support_have_another_forward():
    narrow = LlamaConfig(**{**BASE, "num_attention_heads": 8})  # heads of 8 numbers
    for config in (narrow, LlamaConfig(**{**BASE, "intermediate_size": 100})):
        model = model_of(config)
        assert not has_compiled_forward(model.model)
        assert isinstance(model.forward_pass, PackedLlamaForward)
    shorter = model_of(CONFIGS["qwen3"]).model.bfloat16()
    assert not has_compiled_forward(shorter)
    for weights in ROUNDING:
        with pytest.raises(ModelError, match=f"weights in {weights} need the compiled forward pass"):
            model_of(narrow, weights).prove_forward()
    with pytest.raises(ModelError, match="batch_invariant needs the compiled forward pass"):
        LanguageModel(model_of(narrow).model, "narrow", batch_invariant=True).prove_forward()


def test_large_models_are_compiled_where_their_numbers_are_short(monkeypatch: pytest.MonkeyPatch):
    model = model_of(CONFIGS["qwen3"]).model
    assert sum(weight.numel() for weight in model.parameters()) < SMALL
    assert prefers_compiled_forward(model, "fastest", batch_invariant=False)
    assert choose_weights(model) == "fastest"
    monkeypatch.setattr("stages.engine.compiled.llama_weights.SMALL", 0)
    assert not prefers_compiled_forward(model, "fastest", batch_invariant=False)
    assert prefers_compiled_forward(model, "fastest", batch_invariant=True)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    assert prefers_compiled_forward(model, "fastest", batch_invariant=False)


def test_compiled_code_is_stored_and_damaged_code_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))
    program.compile_steps.cache_clear()
    expected_TV = read_in_steps(model_of(CONFIGS["qwen3"]), TEXT, 9)
    (stored,) = (tmp_path / "cache").glob("compiled-*")
    program.compile_steps.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(program.CompiledSteps, "_build", lambda *_, **__: pytest.fail("compiled again"))
        assert torch.equal(read_in_steps(model_of(CONFIGS["qwen3"]), TEXT, 9), expected_TV)
    stored.write_bytes(stored.read_bytes()[:-40])
    program.compile_steps.cache_clear()
    assert torch.equal(read_in_steps(model_of(CONFIGS["qwen3"]), TEXT, 9), expected_TV)
