"""Checkpoints on users' disks besides whole folders: damaged, quantised, adapted, composite and foreign ones."""

import base64
import json
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_pair import TinyPair
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Llama4Config,
    LlavaConfig,
    Qwen2_5_VLConfig,
)

from benchmarks.model_building import recipes
from stages.engine.models.huggingface import load_causal_model, load_tokenizer, new_llama
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ModelError

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama() -> Any:
    return new_llama(0, **SHAPE).eval()


@pytest.fixture
def folder(llama, tmp_path: Path) -> Path:
    llama.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, name: str = "config.json", **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(source: Path | str) -> str:
    with pytest.raises(ModelError) as error:
        load_causal_model(str(source), "float32", "cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(UP), f"lacks 1: {UP}"),
        (lambda weights: weights.update({UP + "s": weights.pop(UP)}), f"lacks 1: {UP}"),
        (lambda weights: weights.update({UP: torch.zeros(32, 64)}), f"another shape 1: {UP} (32, 64) for (64, 64)"),
        (lambda weights: weights.update({UP + "s": torch.zeros(2)}), f"in excess 1: {UP}s"),
        (lambda weights: [weights.pop(name) for name in list(weights) if ".mlp." in name], "and 3 more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change, message: str):
    edit_weights(folder, change)
    assert message in refusal(folder)


def test_buffers_of_old_checkpoints_and_tied_weights_may_be_there_or_not(folder: Path, tmp_path: Path):
    edit_weights(folder, lambda each: each.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load_causal_model(str(folder), "float32", "cpu")
    new_llama(0, **SHAPE, tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    load_causal_model(str(tmp_path / "tied"), "float32", "cpu")


def test_a_truncated_file_a_missing_shard_and_no_weights_are_refused(llama, folder: Path, tmp_path: Path):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "must load as a model of the type 'llama', but: " in refusal(folder)
    weights.unlink()
    assert "no file named model.safetensors" in refusal(folder)
    llama.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    load_causal_model(str(tmp_path / "shards"), "float32", "cpu")
    shard = next((tmp_path / "shards").glob("model-00002-*"))
    shard.unlink()
    assert shard.name in refusal(tmp_path / "shards")


def test_foreign_architectures_are_refused_by_their_type(folder: Path):
    edit_config(folder, model_type="planted")
    assert "its type is 'planted'; try pip install --upgrade transformers" in refusal(folder)
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_planted.Planted"})
    assert "'planted' comes with code of its own, which is never executed; name another model" in refusal(folder)
    edit_config(folder, model_type="t5", auto_map={})
    assert "its type 't5' generates no text from text alone" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, "gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao"),
    ],
)
def test_a_quantisation_whose_package_is_missing_names_it(folder: Path, config: dict[str, Any], package: str):
    edit_config(folder, quantization_config=config)
    if find_spec(package):
        pytest.skip(f"{package} is installed here")
    assert re.search(f"needs a package that is not installed: .*{package}", refusal(folder))


def test_a_quantisation_that_nobody_knows_is_not_ignored(folder: Path):
    edit_config(folder, quantization_config={"quant_method": "banana"})
    assert "quantised with banana, must load here, but: transformers" in refusal(folder)


def test_weights_in_eight_bit_floats_are_those_of_their_scales(folder: Path):
    pytest.importorskip("accelerate")
    plain = load_file(folder / "model.safetensors")

    def quantise(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "proj" in name]:
            scale = weights[name].abs().max() / 448
            weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale.reshape(1, 1)

    edit_weights(folder, quantise)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})
    loaded = load_causal_model(str(folder), "float32", "cpu")
    scale = plain[UP].abs().max() / 448
    assert torch.equal(loaded.get_parameter(UP), (plain[UP] / scale).to(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize("error", [IndexError("x"), KeyError("x"), AttributeError("x"), ImportError("x"), OSError("x")])
def test_whatever_a_library_raises_is_one_line(folder: Path, error: Exception, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", Mock(side_effect=error))
    assert str(folder) in refusal(folder)


def test_running_out_of_memory_is_not_an_error_of_the_model(folder: Path, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        load_causal_model(str(folder), "float32", "cpu")


def test_a_model_that_torch_cannot_attend_for_is_loaded_with_its_own_attention(folder: Path, tmp_path: Path):
    config = AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bloom")
    assert load_causal_model(str(tmp_path / "bloom"), "float32", "cpu").config._attn_implementation == "eager"
    assert load_causal_model(str(folder), "float32", "cpu").config._attn_implementation == "sdpa"


@pytest.fixture
def adapter(llama, folder: Path) -> tuple[Path, torch.Tensor]:
    peft = pytest.importorskip("peft")
    base = load_causal_model(str(folder), "float32", "cpu")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    torch.manual_seed(2)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(folder.parent / "adapter")
    with torch.no_grad():
        return folder.parent / "adapter", adapted.eval()(torch.arange(10)[None]).logits


def test_an_adapter_is_merged_into_its_base_model(adapter):
    place, wanted = adapter
    for base in (None, "../model"):
        if base:
            edit_config(place, "adapter_config.json", base_model_name_or_path=base)
        loaded = load_causal_model(str(place), "float32", "cpu")
        with torch.no_grad():
            torch.testing.assert_close(loaded(torch.arange(10)[None]).logits, wanted, atol=1e-5, rtol=1e-4)
        assert not any("lora" in name for name, _ in loaded.named_parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_model_name_or_path": None}, "must name its base model"),
        ({"base_model_name_or_path": "/missing"}, "must load from '/missing'"),
        ({"target_modules": ["k_proj"]}, "tensors have no counterpart"),
        ({"r": 8}, "size mismatch"),
        ({"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM"}, "must hold a LoRA adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(adapter, fields: dict[str, Any], message: str):
    edit_config(adapter[0], "adapter_config.json", **fields)
    assert message in refusal(adapter[0])


def test_an_adapter_without_peft_names_the_package(adapter, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    assert refusal(adapter[0]).endswith("needs peft: pip install peft")


TEXT = {**SHAPE, "hidden_size": 32, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGE = {"image_size": 28, "patch_size": 14}
EYE_OF_LLAMA_4 = {**EYE, **IMAGE, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SEEING = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32}
COMPOSITE: dict[str, tuple[Callable[[], Any], str]] = {
    "gemma3": (
        lambda: Gemma3Config(
            text_config=TEXT,
            vision_config={"model_type": "siglip_vision_model", **EYE, **IMAGE},
            mm_tokens_per_image=1,
        ),
        "Gemma3ForCausalLM",
    ),
    "llava": (
        lambda: LlavaConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config={"model_type": "clip_vision_model", **EYE, **IMAGE, "projection_dim": 32},
            image_token_index=63,
        ),
        "LlamaForCausalLM",
    ),
    "llama4": (
        lambda: Llama4Config(
            text_config={**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2}, vision_config=EYE_OF_LLAMA_4
        ),
        "Llama4ForCausalLM",
    ),
    "qwen2_5_vl": (
        lambda: Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={**SEEING, "fullatt_block_indexes": [0]},
            image_token_id=60,
            video_token_id=61,
            vision_start_token_id=62,
            vision_end_token_id=63,
        ),
        "Qwen2_5_VLForConditionalGeneration",
    ),
}


@pytest.mark.parametrize("kind", COMPOSITE)
def test_of_a_model_of_images_and_text_the_text_part_is_used(kind: str, tmp_path: Path, caplog):
    make, text_class = COMPOSITE[kind]
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(make()).eval()
    whole.save_pretrained(tmp_path)
    loaded = load_causal_model(str(tmp_path), "float32", "cpu")
    assert "only its text part is used" in caplog.text
    assert type(loaded).__name__ == text_class
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        # Without images, Llama 4's own forward fails in transformers 5.24: `outputs` has no `image_outputs`.
        reference = whole.language_model if kind == "llama4" else whole
        torch.testing.assert_close(loaded(input_ids=ids).logits, reference(input_ids=ids).logits)
    loaded.save_pretrained(tmp_path / "saved")
    again = load_causal_model(str(tmp_path / "saved"), "float32", "cpu")
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), again.parameters(), strict=True))


@pytest.fixture
def wide(tiny_pair: TinyPair, tmp_path: Path) -> tuple[Path, Any]:
    """A copy of a model whose tokenizer can be widened."""
    shutil.copytree(tiny_pair.target, tmp_path / "wide")
    return tmp_path / "wide", load_tokenizer(str(tmp_path / "wide"))


def test_added_tokens_without_an_output_are_left_out(wide):
    folder, tokenizer = wide
    before = Vocabulary(tokenizer).token_bytes
    tokenizer.add_tokens(["nonsenseword"])
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    tokenizer.save_pretrained(folder)
    width = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) > width
    loaded = load_tokenizer(str(folder))
    assert loaded.pad_token is None
    assert Vocabulary(loaded).token_bytes == before[:width]
    assert max(loaded("a nonsenseword <new pad>")["input_ids"]) < width


def test_ordinary_tokens_without_an_output_are_refused(wide):
    folder, tokenizer = wide
    model = load_causal_model(str(folder), "float32", "cpu")
    model.resize_token_embeddings(len(tokenizer) - 40)
    recipes.save(folder, model, tokenizer)
    with pytest.raises(ModelError, match=r"must have an output for each token .* without one, such as"):
        load_tokenizer(str(folder))


def test_tokenizers_that_cannot_be_converted_name_the_reason(folder: Path, monkeypatch):
    def message() -> str:
        with pytest.raises(ModelError) as error:
            load_tokenizer(str(folder))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "it has no tokenizer.json" in message()
    (folder / "tekken.json").write_text("{}")
    assert "cannot convert tekken.json" in message()
    monkeypatch.setattr("stages.engine.models.load_errors.find_spec", lambda package: None)
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0b")
    assert "pip install sentencepiece" in message()
    (folder / "tokenizer.model").write_bytes(base64.b64encode(b"a") + b" 0\n")
    assert "pip install tiktoken" in message() or "special tokens" in message()
