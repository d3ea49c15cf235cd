"""Writes a Llama as a GGUF file, as llama.cpp's own conversion does, and names the quantisation of a file."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.bench.engines.weights import Array, Llama
from stages.engine.checkpoints.gguf_file import read_gguf
from store.errors import ModelError

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ENDS = ("eos", "eot", "eom")  # keys of end-of-sequence ids
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6  # gguf.TokenType
THREE_DIGITS = r"\p{N}{1,3}"  # Llama-3's pattern for numbers


def name_quantisation(path: Path) -> str:
    """Name the quantisation of a GGUF file, such as `Q4_1`: that which it states, else that of most of its bytes.

    Raises:
        ModelError: it cannot be read.
    """
    import gguf

    file = read_gguf(path)
    try:
        kind = gguf.LlamaFileType(file.metadata["general.file_type"])
        return kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (KeyError, ValueError):
        sizes: Counter[int] = Counter()
        for tensor in file.tensors.values():
            sizes[tensor.kind] += len(tensor.data)
        return gguf.GGMLQuantizationType(sizes.most_common(1)[0][0]).name


def save_gguf(llama: Llama, path: Path, dtype: str, ends: Sequence[int]) -> None:
    """Write a GGUF file.

    Args:
        llama: shape, weights and tokenizer.
        path: file to write.
        dtype: type of the matrices: float32, bfloat16 or float16. Norms stay float32.
        ends: end-of-sequence ids, three at most; without any llama.cpp chooses.

    Raises:
        ModelError: llama.cpp does not support the tokenizer.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, llama)
    _write_tokenizer(writer, llama.tokenizer, llama.vocabulary, ends)
    kind = gguf.GGMLQuantizationType[TYPES[dtype]]
    for name, weight in _tensors(llama):
        if weight.ndim == 1 or dtype == "float32":
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, llama: Llama) -> None:
    writer.add_context_length(llama.longest)
    writer.add_embedding_length(llama.width)
    writer.add_block_count(llama.layers)
    writer.add_feed_forward_length(llama.mlp)
    writer.add_head_count(llama.heads)
    writer.add_head_count_kv(llama.pairs)
    writer.add_key_length(llama.head)
    writer.add_value_length(llama.head)
    writer.add_layer_norm_rms_eps(llama.epsilon)
    writer.add_rope_dimension_count(llama.head)
    writer.add_rope_freq_base(llama.theta)
    writer.add_vocab_size(llama.vocabulary)


def _tensors(llama: Llama) -> Iterator[tuple[str, Array]]:
    """Every weight by its name in GGUF. Without `output.weight` the embedding is the output layer."""
    weights = llama.weights
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    if "lm_head.weight" in weights:
        yield "output.weight", weights["lm_head.weight"]
    heads = {"self_attn.q_proj": llama.heads, "self_attn.k_proj": llama.pairs}
    for layer in range(llama.layers):
        for name, short in NAMES.items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            yield f"blk.{layer}.{short}.weight", _pair_rotary_rows(weight, heads[name]) if name in heads else weight


def _pair_rotary_rows(weight: Array, heads: int) -> Array:
    """Reorder rows for GGUF's rotary positions, which rotate neighbouring dimensions; Hugging Face's rotate halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _write_tokenizer(writer: Any, tokenizer: Any, size: int, ends: Sequence[int]) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    if model["type"] != "BPE":
        raise ModelError(f"llama.cpp needs a BPE tokenizer, this is {model['type']}; leave llama.cpp out")
    texts = {index: text for text, index in model["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in state["added_tokens"]}
    pieces = [texts.get(index, f"[unused {index}]") for index in range(size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model["byte_fallback"]:
        _write_space_marked(writer, pieces, merges)
    else:
        _write_byte_level(writer, state, merges)
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    writer.add_token_list(pieces)
    kinds = [_kind(piece, special, tokenizer.unk_token) for piece in pieces]
    writer.add_token_types([kind if index in texts else UNUSED for index, kind in enumerate(kinds)])
    writer.add_add_bos_token(False)  # ids include BOS
    named = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "unk", "pad")}
    for name, index in (named | dict(zip(ENDS, ends, strict=False))).items():
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)


def _write_byte_level(writer: Any, state: Mapping[str, Any], merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    # llama.cpp names its pre-tokenizers; one of these two is close. It matters only for drafts across vocabularies.
    writer.add_tokenizer_pre("llama-bpe" if THREE_DIGITS in _patterns(state["pre_tokenizer"]) else "gpt-2")
    writer.add_token_merges(merges)


def _patterns(pre_tokenizer: Any) -> str:
    """All regular expressions of a pre-tokenizer, joined."""
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    return " ".join(part.get("pattern", {}).get("Regex", "") for part in parts if part)


def _write_space_marked(writer: Any, pieces: list[str], merges: list[str]) -> None:
    """Write scores instead of merges: llama.cpp merges the pair with the highest score, the merge learned first."""
    learned = {merge.replace(" ", ""): rank for rank, merge in reversed(list(enumerate(merges)))}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(learned.get(piece, len(merges))) for piece in pieces])
    writer.add_add_space_prefix(False)  # a draft continues in the middle of a text


def _kind(piece: str, special: set[str], unknown: str | None) -> int:
    if piece == unknown:
        return UNKNOWN
    if piece in special:
        return CONTROL
    return BYTE if len(piece) == 6 and piece.startswith("<0x") else NORMAL
