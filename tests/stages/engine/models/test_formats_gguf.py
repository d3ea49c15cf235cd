"""GGUF files as models and tokenizers: written here as `llama.cpp` converts, read back, compared with the original."""

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_making import keys_of, tensors_of, write
from places import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from stages.engine.checkpoints.gguf_file import find_gguf, read_gguf
from stages.engine.forward_pass.packed_weights import has_packed_forward
from stages.engine.models.huggingface import load_causal_model, load_tokenizer, read_licence
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ModelError

SMOLLM = ROOT.parent / "shared/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY, WIDTH, HEADS, PAIRS, LAYERS, HEAD = 64, 64, 4, 2, 2, 32
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": PAIRS,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 20000.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
HEAD_KEYS = {"attention.key_length": HEAD, "attention.value_length": HEAD}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + place / 40 for place in range(8)],
    "long_factor": [2.0 + place / 4 for place in range(8)],
    "original_max_position_embeddings": 1024,
    "factor": 4.0,
}
# Per case: architecture of llama.cpp, model type, fields of the configuration, keys of the file.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", {}, {}),
    "llama-tied": ("llama", "llama", {"tie_word_embeddings": True}, {}),
    "llama-3": ("llama", "llama", {"rope_parameters": {"rope_theta": 20000.0, **LLAMA_3}}, {}),
    "llama-linear": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4}, {"expert_count": 4, "expert_used_count": 2}),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": HEAD}, HEAD_KEYS),
    "qwen2moe": (
        "qwen2moe",
        "qwen2_moe",
        {"num_experts": 4, "shared_expert_intermediate_size": 40, **EXPERTS},
        {"expert_shared_feed_forward_length": 40, **EXPERT_KEYS},
    ),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        {"num_experts": 4, "norm_topk_prob": True, "head_dim": HEAD, **EXPERTS},
        {**EXPERT_KEYS, **HEAD_KEYS},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"tie_word_embeddings": True, "head_dim": HEAD, "query_pre_attn_scalar": HEAD, "sliding_window": 16},
        {
            **HEAD_KEYS,
            "attention.sliding_window": 16,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": HEAD,
            "query_pre_attn_scalar": HEAD,
            "sliding_window": 16,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            **HEAD_KEYS,
            "attention.sliding_window": 16,
            "block_count": 6,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 16}, {"attention.sliding_window": 16}),
    "phi3-long": (
        "phi3",
        "phi3",
        {"rope_parameters": {"rope_theta": 20000.0, **LONG}, "original_max_position_embeddings": 1024},
        {"rope.scaling.original_context_length": 1024},
    ),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4}, {"block_count": 4}),
    "granite": (
        "granite",
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.25,
            "logits_scaling": 2.0,
        },
        {"embedding_scale": 12.0, "attention.scale": 0.2, "residual_scale": 0.25, "logit_scale": 2.0},
    ),
}


def make(model_type: str, **fields: Any) -> Any:
    torch.manual_seed(1)
    base = {**SHAPE, "rms_norm_eps": 1e-6, "rope_parameters": ROPE, "tie_word_embeddings": False}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**base, **fields})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_model_that_was_written(name: str, tmp_path: Path):
    architecture, model_type, fields, keys = CASES[name]
    model = make(model_type, **fields)
    tensors = tensors_of(model, architecture)
    if name == "llama-3":
        turned = model.model.rotary_emb.inv_freq.double()
        plain = 20000.0 ** -(torch.arange(0, WIDTH // HEADS, 2).double() / (WIDTH // HEADS))
        tensors["rope_freqs.weight"] = (plain / turned).float().numpy()
    if name == "phi3-long":
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(LONG[f"{kind}_factor"], dtype=np.float32)
    path = write(tmp_path / "model.gguf", architecture, keys_of(model.config, **keys), tensors)
    loaded = load_causal_model(str(path), "float32", "cpu")
    assert loaded.config.model_type == model_type
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """A file, its keys and its tensors."""
    model = make("llama")
    keys, tensors = keys_of(model.config), tensors_of(model, "llama")
    return write(tmp_path / "tiny-F32.gguf", "llama", keys, tensors), keys, tensors


def test_a_loaded_file_is_a_plain_model(tiny, tmp_path: Path):
    path, _, _ = tiny
    loaded = load_causal_model(str(path), "float32", "cpu")
    assert has_packed_forward(loaded)
    assert not hasattr(loaded.config, "quantization_config")
    loaded.save_pretrained(tmp_path / "saved")
    again = load_causal_model(str(tmp_path / "saved"), "float32", "cpu")
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), again.parameters(), strict=True))
    assert load_causal_model(str(path), "auto", "cpu").dtype == torch.float32
    assert load_causal_model(str(path), "bfloat16", "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "BF16", "F16"])
def test_quantised_weights_are_those_of_the_format(kind: str, tmp_path: Path):
    model, quantisation = make("llama"), gguf.GGMLQuantizationType[kind]
    tensors = tensors_of(model, "llama")
    write(tmp_path / "q.gguf", "llama", keys_of(model.config), tensors, kind)
    loaded = load_causal_model(str(tmp_path / "q.gguf"), "float32", "cpu")
    wanted = gguf.quants.dequantize(gguf.quants.quantize(tensors["blk.1.ffn_up.weight"], quantisation), quantisation)
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, torch.from_numpy(wanted.astype(np.float32)))


def test_a_file_that_is_cut_off_is_refused_in_one_line(tiny):
    path, _, _ = tiny
    whole = path.read_bytes()
    for length in (0, 3, 10, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError) as error:
            load_causal_model(str(path), "float32", "cpu")
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)


def test_another_file_and_a_missing_one_are_refused(tmp_path: Path):
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ModelError, match="must be a GGUF file, but does not begin with 'GGUF'"):
        load_causal_model(str(tmp_path / "text.gguf"), "float32", "cpu")
    with pytest.raises(ModelError, match="there is no such file"):
        load_tokenizer(str(tmp_path / "missing.gguf"))
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ModelError, match="name its folder"):
        load_causal_model(str(tmp_path / "notes.txt"), "float32", "cpu")


def test_tensors_that_are_missing_or_unknown_are_named(tiny):
    path, keys, tensors = tiny
    square = {**tensors, "blk.0.ffn_up.weight": tensors["blk.0.attn_q.weight"]}
    for wrong, message in (
        ({name: each for name, each in tensors.items() if "blk.1.ffn_up" not in name}, "lacks 1: blk.1.ffn_up.weight"),
        ({**tensors, "a.weight": tensors["output_norm.weight"]}, "in excess 1: a.weight"),
        (square, "blk.0.ffn_up.weight of shape (96, 64), but has (64, 64)"),
    ):
        write(path, "llama", keys, wrong)
        with pytest.raises(ModelError, match=re.escape(message)):
            load_causal_model(str(path), "float32", "cpu")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"attention.clamp": 3.0}, r"attention\.clamp of the architecture llama"),
        ({"rope.dimension_count": 8}, "turns 8"),
        ({"rope.scaling.type": "spiral"}, "but has 'spiral'"),
    ],
)
def test_what_the_file_states_and_nobody_knows_is_refused(tiny, stated: dict[str, Any], message: str):
    path, keys, tensors = tiny
    write(path, "llama", {**keys, **stated}, tensors)
    with pytest.raises(ModelError, match=message):
        load_causal_model(str(path), "float32", "cpu")


def test_an_architecture_that_cannot_be_read_is_refused_in_one_line(tiny):
    path, keys, tensors = tiny
    for architecture in ("plamo3", "gpt-oss"):
        write(path, architecture, keys, tensors)
        with pytest.raises(ModelError, match=rf"^[^\n]*read exactly \(llama, .* but is of '{architecture}'[^\n]*\Z"):
            load_causal_model(str(path), "float32", "cpu")


def test_an_architecture_that_transformers_reads_whole_is_left_to_it(tmp_path: Path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers.integrations.gguf")
    config = AutoConfig.for_model(
        "lfm2", **SHAPE, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    )
    torch.manual_seed(0)
    model, tensors = AutoModelForCausalLM.from_config(config).eval(), {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, LAYERS)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":
            own = names.get_name(name, try_suffixes=(".weight", ".bias"))
            tensors[own] = weight.squeeze(1).numpy() if "conv.conv" in name else weight.numpy()
    config.rms_norm_eps = config.norm_eps
    keys = keys_of(config, **{"attention.head_count_kv": [0, PAIRS], "shortconv.l_cache": config.conv_L_cache})
    keys |= {"vocab_size": VOCABULARY, "tokenizer.ggml.tokens": [f"t{index}" for index in range(VOCABULARY)]}
    loaded = load_causal_model(str(write(tmp_path / "lfm2.gguf", "lfm2", keys, tensors)), "float32", "cpu")
    assert not hasattr(loaded.config, "quantization_config")
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)
    loaded.save_pretrained(tmp_path / "saved")


def test_names_mean_files(tmp_path: Path, monkeypatch):
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a.gguf", "a-imatrix.gguf", "b.F16-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert find_gguf(f"{tmp_path}:q8_0") == tmp_path / "a-Q8_0.gguf"
    assert find_gguf(f"{tmp_path}:a-Q4_K_M.gguf") == tmp_path / "a-Q4_K_M.gguf"
    with pytest.raises(ModelError, match=r"has 2 of: a-Q4_K_M.gguf, a-Q8_0.gguf; name one: .*:a-Q4_K_M.gguf"):
        find_gguf(str(tmp_path))
    with pytest.raises(ModelError, match="of 'Q5_1', but has 0"):
        find_gguf(f"{tmp_path}:Q5_1")
    (tmp_path / "a-Q8_0.gguf").unlink()
    assert find_gguf(str(tmp_path)) == tmp_path / "a-Q4_K_M.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(str(tmp_path)) is None
    assert find_gguf("owner/name") is None
    cached = tmp_path / "models--owner--name" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "name.Q4_K_M.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_gguf("owner/name:Q4_K_M") == cached / "name.Q4_K_M.gguf"
    with pytest.raises(ModelError, match="owner/name:Q8_0 must be on the hub or in its cache"):
        find_gguf("owner/name:Q8_0")


def test_a_divided_file_is_read_whole(tiny):
    path, keys, tensors = tiny
    names = list(tensors)
    first, second = path.with_name("t-00001-of-00002.gguf"), path.with_name("t-00002-of-00002.gguf")
    write(first, "llama", {"split.count": 2, **keys}, {name: tensors[name] for name in names[:5]})
    with pytest.raises(ModelError, match=r"2 parts, but t-00002-of-00002\.gguf is missing"):
        load_causal_model(str(first), "float32", "cpu")
    write(second, "llama", {}, {name: tensors[name] for name in names[5:]})
    loaded, whole = (load_causal_model(str(each), "float32", "cpu") for each in (first, path))
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), whole.parameters(), strict=True))


TEXTS = ("Hello  world, 12345 it's", "日本語 → naïve\n\n\tdef f(x):   return x", " leading", "DON'T 3.14 <|eot_id|>")


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM.exists(), reason="the model is not at hand")
def test_a_real_chat_model_answers():
    model, tokenizer = load_causal_model(str(SMOLLM.parent), "float32", "cpu"), load_tokenizer(str(SMOLLM))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    with torch.no_grad():
        reply = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id
    assert read_licence(str(SMOLLM)) == "apache-2.0"


@pytest.mark.skipif(not SMOLLM.exists(), reason="the model is not at hand")
def test_a_real_vocabulary_is_that_of_the_file():
    tokens = read_gguf(SMOLLM).metadata["tokenizer.ggml.tokens"]
    tokenizer = load_tokenizer(str(SMOLLM))
    assert [tokenizer.convert_tokens_to_ids(token) for token in tokens] == [*range(len(tokens))]
    vocabulary = Vocabulary(tokenizer, "SmolLM2")
    assert (vocabulary.size, vocabulary.bos, vocabulary.eos, len(vocabulary.specials)) == (len(tokens), 1, 2, 17)
    for text in TEXTS:
        assert b"".join(vocabulary.bytes_of(index) or b"" for index in vocabulary.encode(text)) == text.encode()
    assert tokenizer("2024", add_special_tokens=False)["input_ids"] == [34, 32, 34, 36], "digits are single tokens"


def test_a_hostile_header_is_refused(tmp_path: Path):
    for counts in ((1 << 60, 0), (0, 1 << 60), (1, 1)):
        (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"\xff" * 64)
        with pytest.raises(ModelError, match="cut off or damaged"):
            read_gguf(tmp_path / "x.gguf")
