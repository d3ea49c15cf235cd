"""Models whose matrices stay in their files: they are the model that is read whole, and hold none of them."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doubles import read_in_steps
from gguf_making import keys_of, tensors_of, write
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.assembly.models import load_drafter
from pipeline.config.settings import Config
from stages.engine.checkpoints import mapped_checkpoint
from stages.engine.compiled import packing
from stages.engine.compiled.program import CompiledSteps
from stages.engine.forward_pass.forward import record_hidden
from stages.engine.forward_pass.proof import read_at_once, read_texts
from stages.engine.models.language_model import LanguageModel, fingerprint, load_model, read_trained_weights
from stages.engine.quantisation.modules import find_stored, is_mapped, mean_bytes
from stages.engine.quantisation.stored import NUMBER_TYPES, StoredRows
from store.errors import ModelError

SHAPE = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
HEAD = {"attention.key_length": 32, "attention.value_length": 32}
GRANITE = {"embedding_scale": 12.0, "attention.scale": 0.2, "residual_scale": 0.25, "logit_scale": 2.0}
# Per case: architecture in GGUF, type of the matrices, fields of the configuration, keys of the file.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    **{kind: ("llama", kind, {}, {}) for kind in "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q5_K IQ4_NL IQ4_XS MXFP4".split()},
    **{kind: ("llama", kind, {}, {}) for kind in ("BF16", "F16")},
    "tied": ("llama", "Q4_K", {"tie_word_embeddings": True}, {}),
    "biases": ("qwen2", "Q6_K", {"tie_word_embeddings": True}, {}),
    "gemma2": ("gemma2", "Q4_K", {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}, HEAD),
    "joined": ("phi3", "Q4_K", {}, {}),
    "granite": (
        "granite",
        "Q8_0",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.25, "logits_scaling": 2.0},
        GRANITE,
    ),
}


def make_case(name: str) -> Any:
    architecture, _, fields, _ = CASES[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **{**SHAPE, **fields}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model


def write_case(name: str, folder: Path) -> Path:
    architecture, kind, _, keys = CASES[name]
    model = make_case(name)
    return write(
        folder / f"{name}.gguf", architecture, keys_of(model.config, **keys), tensors_of(model, architecture), kind
    )


def held_bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))


def complete(model: LanguageModel, text: list[int], count: int) -> list[int]:
    for _ in range(count):
        text = [*text, int(read_in_steps(model, text)[-1].argmax())]
    return text


@pytest.mark.representatives("Q4_0", "F16", "tied", "biases", "gemma2", "joined", "granite")
@pytest.mark.parametrize("name", CASES)
def test_a_mapped_model_is_the_model_that_is_read_whole(name: str, tmp_path: Path):
    path = str(write_case(name, tmp_path))
    mapped, whole = load_model(path, "float32", "cpu", "auto"), load_model(path, "float32", "cpu", "auto", trained=True)
    assert is_mapped(mapped.model)
    assert not is_mapped(whole.model)
    assert held_bytes(mapped.model) < 0.02 * held_bytes(whole.model), "norms, biases and frequencies"
    assert fingerprint(mapped) == fingerprint(whole)
    for field in ("parameters", "weights", "vocabulary_size", "hidden_size", "eos_ids"):
        assert getattr(mapped, field) == getattr(whole, field)
    numbers = CASES[name][1] in NUMBER_TYPES
    for kind in ("codes", "int4", "fastest"):
        assert mean_bytes(mapped.model, kind) == (2.0 if numbers else mean_bytes(whole.model, kind))
    ids = torch.randint(3, 384, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(mapped.read(ids), whole.read(ids), atol=1e-5, rtol=1e-5)
    for model in (mapped, whole):
        model.prove_forward()
    assert mapped.forward_pass.name == whole.forward_pass.name
    assert mapped.reads_trees == whole.reads_trees
    text = ids[0].tolist()
    assert torch.equal(read_in_steps(mapped, text), read_in_steps(whole, text))
    assert complete(mapped, text[:5], 10) == complete(whole, text[:5], 10)
    kept = set(range(7, 90))
    for model in (mapped, whole):
        model.restrict(kept)
    assert torch.equal(read_in_steps(mapped, text), read_in_steps(whole, text))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Q4_0", "biases", "gemma2"])  # by their architectures
def test_matrices_of_16_bits_stay_in_their_files(
    name: str, kind: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mapped_checkpoint, "MAPPED_FROM", 0)
    made = make_case(name).to(kind)
    made.generation_config.eos_token_id = [7, 9]
    made.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    mapped, whole = (load_model(str(tmp_path), "float32", "cpu", "auto", trained=trained) for trained in (False, True))
    assert [is_mapped(model.model) for model in (mapped, whole)] == [True, False]
    assert held_bytes(mapped.model) < 0.02 * held_bytes(whole.model)
    assert fingerprint(mapped) == fingerprint(whole)
    for field in ("parameters", "weights", "vocabulary_size", "hidden_size", "eos_ids"):
        assert getattr(mapped, field) == getattr(whole, field)
    for model in (mapped, whole):
        model.prove_forward()
    assert mapped.forward_pass.name == whole.forward_pass.name
    assert mapped.reads_trees == whole.reads_trees
    text = list(range(40, 90))
    assert torch.equal(read_in_steps(mapped, text), read_in_steps(whole, text))
    for model in (mapped, whole):
        model.restrict(set(range(7, 90)))
    assert torch.equal(read_in_steps(mapped, text), read_in_steps(whole, text))
    assert not is_mapped(load_model(str(tmp_path), "float32", "cpu", "int4").model), "quantised here"
    with torch.no_grad():
        made.model.layers[1].mlp.down_proj.weight[200, 3] = float("-inf")
    made.save_pretrained(tmp_path, max_shard_size="500KB")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
        load_model(str(tmp_path), "float32", "cpu", "auto")


@pytest.mark.parametrize("change", ["float32", "more", "small"])
def test_other_folders_are_read_whole(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if change != "small":
        monkeypatch.setattr(mapped_checkpoint, "MAPPED_FROM", 0)
    made = make_case("Q4_0")
    if change != "float32":
        made = made.bfloat16()
    if change == "more":
        made.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
    made.save_pretrained(tmp_path)
    if change == "more":
        with pytest.raises(ModelError, match="in excess"):
            load_model(str(tmp_path), "float32", "cpu")
    else:
        assert not is_mapped(load_model(str(tmp_path), "float32", "cpu").model)


@pytest.mark.parametrize("name", ["Q4_0", "F16", "tied", "joined"])  # rows in another order, one matrix twice, parts
def test_the_next_start_maps_what_was_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))
    path, text = write_case(name, tmp_path), list(range(40, 80))

    def read() -> torch.Tensor:
        model = load_model(str(path), "float32", "cpu", "auto")
        model.prove_forward()
        model.prepare_output()
        return read_in_steps(model, text)

    packed = read()
    kept = sorted((tmp_path / "cache").glob("packed-*"))
    assert [one.name.split("-")[2] for one in kept] == ["layers", "output"]
    assert sum(one.stat().st_size for one in kept) <= path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_write_blocks", None)
        assert torch.equal(read(), packed)
    changed = bytearray(path.read_bytes())
    changed[-1000:] = changed[-3000:-2000]
    path.write_bytes(changed)
    assert not torch.equal(read(), packed), "a changed file is packed again"


def test_every_weight_is_that_of_the_whole_model(tmp_path: Path):
    path = str(write_case("tied", tmp_path))
    mapped, whole = (load_model(path, "float32", "cpu", trained=trained).model for trained in (False, True))
    for name, module in whole.named_modules():
        stored, weight = find_stored(mapped.get_submodule(name)), getattr(module, "weight", None)
        if stored is None:
            continue
        assert torch.equal(stored.dequantise(), weight)
        assert torch.equal(mapped.get_submodule(name).weight, weight)
        assert torch.equal(stored.sample(37), weight.flatten()[::37])
        some = torch.tensor([5, 0, 100, 5])
        assert torch.equal(stored.take(some).dequantise(), weight[some])
        assert torch.equal(torch.cat([part.clone() for _, part in stored.iterate(1000)]), weight)
        stored.release()
        assert torch.equal(stored.dequantise(some), weight[some]), "read again"
    assert find_stored(mapped.lm_head) is find_stored(mapped.model.embed_tokens)


def test_rows_are_kept_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stored = find_stored(load_model(str(write_case("Q4_0", tmp_path)), "float32", "cpu").model.model.embed_tokens)
    assert stored is not None
    monkeypatch.setattr("stages.engine.quantisation.stored.KEPT_WEIGHTS", 10 * 256)
    rows, weight = StoredRows(stored), stored.dequantise()
    for ids in ([3, 3, 4], list(range(9)), [8, 1], list(range(30)), [40]):
        assert torch.equal(torch.from_numpy(rows[ids]), weight[ids])
        assert len(rows._kept) <= max(10, len(ids))


@pytest.mark.parametrize("method", ["gradient", "least-squares", None])
def test_what_is_trained_of_a_drafter_is_read_whole(method: str | None, tmp_path: Path):
    path = str(write_case("biases", tmp_path))
    config = Config().with_overrides({"targets": ("never read",), "drafter": path, "learn.enabled": method is not None})
    drafter = load_drafter(config.with_overrides({"learn.method": method} if method else {}), path, "cpu")
    assert is_mapped(drafter.model) is (method != "gradient")
    assert (find_stored(drafter.model.lm_head) is None) is (method is not None)
    assert len(drafter.trained_weights) > 0


@pytest.mark.parametrize("name", ["biases", "Q8_0", "F16"])  # a layer that is tied, one that is not, and numbers
def test_of_a_drafter_that_is_corrected_the_output_layer_alone_has_full_precision(name: str, tmp_path: Path):
    path = str(write_case(name, tmp_path))
    config = Config().with_overrides({"targets": ("never read",), "drafter": path})
    drafter = load_drafter(config, path, "cpu")
    assert held_bytes(drafter.model) < 1.1 * drafter.model.lm_head.weight.nbytes
    assert fingerprint(drafter) == fingerprint(load_drafter(config, path, "cpu"))
    layer, states = drafter.model.lm_head.weight, list(drafter.extra.parameters())
    assert list(map(id, drafter.trained_weights)) == list(map(id, [layer, *states]))
    copied, text = drafter.copy_to_train(), list(range(5, 25))
    own = {id(weight) for weight in drafter.model.parameters()}
    assert [name for name, weight in copied.model.named_parameters() if id(weight) not in own] == ["lm_head.weight"]
    packed, before_TV = drafter.forward_pass.weights, read_in_steps(drafter, text)
    layers = packed.layers
    drafter.load_weights([layer * 2, *states])
    assert packed.layers is layers, "still in the bits of the file"
    assert drafter.forward_pass.find_output_layer().kind.form == "F16"
    torch.testing.assert_close(read_in_steps(drafter, text), 2 * before_TV, atol=2e-2, rtol=1e-2)
    ids = torch.tensor([text])
    torch.testing.assert_close(2 * copied.read(ids), drafter.read(ids))
    drafter.save(tmp_path / "version", SimpleNamespace(save_pretrained=lambda folder: None))
    assert torch.equal(read_trained_weights(tmp_path / "version", drafter)[0], layer)
    saved = load_model(str(tmp_path / "version"), "float32", "cpu")
    with torch.no_grad():
        torch.testing.assert_close(saved.read(ids), drafter.read(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["tied", "gemma2"])
def test_the_proof_reads_what_the_modules_compute(name: str, tmp_path: Path):
    model = load_model(str(write_case(name, tmp_path)), "float32", "cpu", "auto").model
    texts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 30], [5, 6, 7, 8, 40], [11]]
    wanted = [6, 2, 0, 1]
    alone = [read_at_once(model, text)[len(text) - count :] for text, count in zip(texts, wanted, strict=True)]
    for found, expected in zip(read_texts(model, texts, wanted), alone, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("blocks", [slice(0, 1), slice(None)], ids=["a scale", "a row"])
@pytest.mark.parametrize("part", ["entered", "left", "output"])
def test_a_pass_with_another_sign_is_refused(part: str, blocks: slice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))  # nothing is proved yet
    model = load_model(str(write_case("biases", tmp_path)), "float32", "cpu", "auto")
    model.prepare_output()
    packed = model.forward_pass.weights
    layer = packed.layers[1]
    matrix = {"entered": layer.gated.enter[0], "left": layer.gated.leave, "output": packed._output}[part]
    matrix.scales.numpy()[0, blocks, :, 3] ^= np.int16(-1 << 15)
    with pytest.raises(ModelError, match="deviate"):
        model.prove_forward()


def test_a_model_of_the_hub_stays_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mapped_checkpoint, "MAPPED_FROM", 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--owner--name"
    made = make_case("tied").bfloat16()
    made.save_pretrained(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    model = load_model("owner/name", "float32", "cpu", "auto")
    assert is_mapped(model.model)
    assert fingerprint(model) == fingerprint(load_model(str(cached / "snapshots" / "abc"), "float32", "cpu", "auto"))


def test_a_pass_keeps_its_rotations_while_another_thread_needs_longer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, text = load_model(str(write_case("biases", tmp_path)), "float32", "cpu", "auto"), list(range(40, 60))
    expected, weights, run = read_in_steps(model, text), model.forward_pass.weights, CompiledSteps.run

    def run_late(steps: CompiledSteps, *arguments: Any) -> None:
        tables = weights.rotation_tables(1)
        weights.rotation_tables(tables.shape[1] + 16)
        del tables
        garbage = [torch.full((length, 32), float("nan")) for length in range(1, 500)]
        run(steps, *arguments)
        del garbage

    monkeypatch.setattr(CompiledSteps, "run", run_late)
    assert torch.equal(read_in_steps(model, text), expected)


@pytest.mark.parametrize("name", ["biases", "F16", "gemma2", "granite"])
def test_a_reader_gives_the_inputs_of_the_output_layer(name: str, tmp_path: Path):
    model = load_model(str(write_case(name, tmp_path)), "float32", "cpu", "auto")
    assert model.make_reader() is None, "nothing is packed yet"
    model.prove_forward()
    read, text = model.make_reader(), list(range(5, 45))
    if name in ("gemma2", "granite"):  # whose logits are capped or scaled
        assert read is None
        return
    assert read is not None
    with record_hidden(model.model) as recorded:
        logits_TV = model.read(torch.tensor([text]))[0]
    for part in (text[:9], text):  # one text after another
        states_TW = read(part)
        torch.testing.assert_close(states_TW, recorded[0][0, : len(part)], atol=0.01, rtol=0.01)
        torch.testing.assert_close(model.model.lm_head(states_TW), logits_TV[: len(part)], atol=0.02, rtol=0.01)
