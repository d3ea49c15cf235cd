"""Writes a Llama as a GGUF file, as llama.cpp's own conversion does."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.engine.models.huggingface import load_causal_model, load_tokenizer
from store.errors import ModelError

Array = np.ndarray[Any, Any]
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


@dataclass(frozen=True)
class Llama:
    """A Llama and its tokenizer.

    Attributes:
        weights: float32 arrays by name; without `lm_head.weight` the embedding is the output layer.
        layers, width, heads, pairs, head, mlp, vocabulary: shape of the model; `pairs` are key-value heads, `head` is
            the width of one head.
        longest: context length in tokens.
        epsilon, theta: constants of the norms and of the rotary positions.
        tokenizer: tokenizer of `transformers`.
    """

    weights: Mapping[str, Array]
    layers: int
    width: int
    heads: int
    pairs: int
    head: int
    mlp: int
    vocabulary: int
    longest: int
    epsilon: float
    theta: float
    tokenizer: Any


def load_llama(source: str) -> Llama:
    """Load a Llama from a hub name or folder.

    Raises:
        ModelError: the model does not load, or is not a plain Llama.
    """
    model = load_causal_model(source, "float32", "cpu")
    config = model.config
    positions = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias or positions["rope_type"] != "default":
        raise ModelError(
            f"a GGUF file needs a Llama without biases and with plain rotary positions, {source!r} is another model "
            f"({config.model_type})"
        )
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return Llama(
        weights=weights,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        pairs=config.num_key_value_heads,
        head=config.head_dim,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        longest=config.max_position_embeddings,
        epsilon=config.rms_norm_eps,
        theta=positions["rope_theta"],
        tokenizer=load_tokenizer(source),
    )


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
