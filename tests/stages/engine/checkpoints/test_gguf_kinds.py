"""Every type of weights that a GGUF file can have: computed with in its own bits, or refused by its name."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_making import keys_of, tensors_of, write
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stages.engine.models.huggingface import load_causal_model
from stages.engine.quantisation.modules import find_attached
from stages.engine.quantisation.stored import StoredMatrix
from store.errors import ModelError

WIDTH = 256  # the inputs of a block of the K types
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=WIDTH,
    intermediate_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)
# Where the scales of a block are, 16-bit numbers one after another, for types that the library does not write.
SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)),
    "IQ1_M": (),  # in parts among the codes
}
KINDS = "Q2_K Q3_K Q4_0 Q4_1 Q4_K Q5_0 Q5_1 Q5_K Q6_K Q8_0 IQ4_NL IQ4_XS MXFP4".split()
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
REFUSED = (*(kind for kind in SCALES if kind not in KINDS), "TQ1_0", "TQ2_0", "NVFP4", "Q1_0", "F64")
# What llama-quantize makes of a name is a type for most matrices, and others for some: the main type, and the others.
MIXES = {
    "Q2_K": ("Q2_K", {"attn_v": "Q4_K", "attn_output": "Q3_K", "ffn_down": "Q3_K", "output.": "Q6_K"}),
    "Q2_K_S": ("Q2_K", {"attn_v": "Q4_K", "ffn_down": "Q4_K", "output.": "Q6_K"}),
    "Q3_K_S": ("Q3_K", {"output.": "Q6_K"}),
    "Q3_K_M": ("Q3_K", {"attn_v": "Q5_K", "attn_output": "Q4_K", "ffn_down": "Q4_K", "output.": "Q6_K"}),
    "Q3_K_L": ("Q3_K", {"attn_v": "Q5_K", "attn_output": "Q5_K", "ffn_down": "Q5_K", "output.": "Q6_K"}),
    "Q4_K_S": ("Q4_K", {"attn_v": "Q5_K", "ffn_down": "Q5_K", "output.": "Q6_K"}),
    "Q4_K_M": ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.": "Q6_K"}),
    "Q5_K_M": ("Q5_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.": "Q6_K"}),
    "Q4_0": ("Q4_0", {"output.": "Q6_K"}),
    "Q8_0": ("Q8_0", {}),
    "IQ4_XS": ("IQ4_XS", {"attn_v": "Q5_K", "output.": "Q6_K"}),
}


def make_rows(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the bytes of each row of a matrix; of types that the library does not write, any codes."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES and kind not in ("NVFP4", "Q1_0", "F64"):
        return gguf.quants.quantize(values, number).view(np.uint8)
    inputs, size = gguf.GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(len(kind) + values.size)
    blocks = generator.integers(0, 256, (values.size // inputs, size), dtype=np.uint8)
    for start in SCALES.get(kind, ()):
        halves = generator.normal(0, 0.01, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = halves.view(np.uint8)
    return blocks.reshape(len(values), -1)


def write_kinds(path: Path, main: str, others: Mapping[str, str]) -> dict[str, tuple[str, np.ndarray]]:
    """Write a model whose matrices have a type and some of them others; return the type and the bytes of each."""
    torch.manual_seed(0)
    model, rows = LlamaForCausalLM(CONFIG), {}
    tensors = tensors_of(model, "llama")
    for name, values in tensors.items():
        if values.ndim == 2:
            kind = next((each for part, each in others.items() if part in name), main)
            rows[name] = (kind, make_rows(values, kind))
    write(path, "llama", keys_of(CONFIG), tensors, rows=rows)
    return rows


def source_of(name: str) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    return f"{names.get_name(name)}.weight"


@pytest.mark.parametrize("mix", [*KINDS, *(f"{name} mix" for name in MIXES)])
def test_a_matrix_keeps_its_own_bits(mix: str, tmp_path: Path):
    main, others = MIXES[mix.removesuffix(" mix")] if mix.endswith(" mix") else (mix, {})
    rows = write_kinds(tmp_path / "m.gguf", main, others)
    model = load_causal_model(str(tmp_path / "m.gguf"), "float32", "cpu", codes=True)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert len(linears) == 7 * CONFIG.num_hidden_layers + 1
    for name, linear in linears.items():
        kind, stored = rows[source_of(name)]
        groups = find_attached(linear)
        assert isinstance(groups, StoredMatrix), name
        assert groups.kind == kind
        values = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]))
        assert torch.equal(groups.dequantise().sort(0).values, values.sort(0).values), f"{name}: other numbers"


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_numbers_keep_their_type(kind: str, tmp_path: Path):
    rows = write_kinds(tmp_path / "m.gguf", kind, {})
    model = load_causal_model(str(tmp_path / "m.gguf"), "auto", "cpu", codes=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == PLAIN[kind]
    assert weight.detach().contiguous().view(torch.uint8).numpy().tobytes() == rows["blk.0.ffn_up.weight"][1].tobytes()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_without_codes_is_refused_by_its_name(kind: str, tmp_path: Path):
    write_kinds(tmp_path / "m.gguf", "Q4_K", {"ffn_down": kind})
    with pytest.raises(ModelError, match=rf"of its \d+ tensors it has 2 in {kind}; take a file .* in Q4_K_M") as error:
        load_causal_model(str(tmp_path / "m.gguf"), "float32", "cpu", codes=True)
    assert "\n" not in str(error.value)


def test_every_type_of_the_library_is_computed_with_or_refused():
    inner = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64"}  # of activations and indices, in no file of weights
    assert {kind.name for kind in gguf.GGMLQuantizationType} - inner == {*KINDS, *PLAIN, *REFUSED}


def test_a_type_that_the_library_does_not_know_is_named(tmp_path: Path):
    path = tmp_path / "m.gguf"
    write_kinds(path, "Q8_0", {})
    name = b"blk.1.ffn_up.weight"
    whole = bytearray(path.read_bytes())
    place = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[place : place + 4] == (8).to_bytes(4, "little")
    whole[place : place + 4] = (99).to_bytes(4, "little")
    path.write_bytes(whole)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight is in number 99; pip install --upgrade gguf"):
        load_causal_model(str(path), "float32", "cpu")
