"""Writes models as GGUF files, as llama.cpp's own conversion does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
PERMUTED, OFFSET = ("llama", "smollm3", "granite"), ("gemma2", "gemma3")
PLAIN_KEYS = ("tokenizer", "general", "split")  # that do not begin with the name of the architecture


def tensors_of(model: Any, architecture: str) -> dict[str, Array]:
    """A model's tensors as `llama.cpp` writes them: names, order of rotated pairs, norms with 1 added."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, found = gguf.get_tensor_name_map(number, model.config.num_hidden_layers), {}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            stem = f"blk.{name.split('.')[2]}.ffn_"
            half = values.shape[1] // 2
            found |= {f"{stem}gate_exps.weight": values[:, :half], f"{stem}up_exps.weight": values[:, half:]}
            continue
        if name.endswith("experts.down_proj"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = values
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own, name
        rows = heads.get(own.split(".")[-2])
        if architecture in PERMUTED and rows:
            halves = values.reshape(rows, 2, values.shape[0] // rows // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if architecture in OFFSET and own.endswith("norm.weight"):
            values = values + 1
        found[own] = np.ascontiguousarray(values)
    return found


def keys_of(config: Any, **others: Any) -> dict[str, Any]:
    """The keys of a configuration that all architectures have, and others in their place."""
    return {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters.get("rope_theta"),
        **others,
    }


def quantise(values: Array, kind: str, scale: float = 0.01) -> Array:
    """Rows of blocks of a type; those that the library does not write have any codes, and scales of a size."""
    number = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K") and kind[0] != "I":
        return gguf.quants.quantize(values, number)
    inputs, size = gguf.GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (values.size // inputs, size), dtype=np.uint8)
    ends = {"Q2_K": slice(-4, None), "Q4_K": slice(4), "Q5_K": slice(4), "IQ4_NL": slice(2), "IQ4_XS": slice(2)}
    scales = ends.get(kind, slice(-2, None))
    halves = generator.normal(0, scale, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    blocks[:, scales] = halves[:, : blocks[:, scales].shape[1]]
    return blocks.reshape(len(values), -1)


def write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Array],
    kind: str = "F32",
    rows: Mapping[str, tuple[str, Array]] | None = None,
) -> Path:
    """Write a file whose matrices have a type of GGUF; of some the type and the bytes of each row are given."""
    writer, quantisation = gguf.GGUFWriter(path, architecture), gguf.GGMLQuantizationType[kind]
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        name = key if key.partition(".")[0] in PLAIN_KEYS else f"{architecture}.{key}"
        adders.get(type(value), writer.add_array)(name, value)
    for name, values in tensors.items():
        if rows and name in rows:
            writer.add_tensor(name, rows[name][1], raw_dtype=gguf.GGMLQuantizationType[rows[name][0]])
        elif kind == "F32" or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantise(values, kind, 1e-4), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
