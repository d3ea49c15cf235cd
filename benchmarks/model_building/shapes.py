"""Writes a GGUF file with the sizes of a model: `python -m benchmarks.model_building.shapes qwen2.5-7b FILE`.

Its weights are random codes of the types that llama.cpp's Q4_K_M mixes: for measuring seconds and memory.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Form
from tokenizers import pre_tokenizers

from benchmarks.command import run
from stages.engine.checkpoints.gguf_file import read_gguf
from store.errors import UsageError

TILE = 40_000  # blocks that are drawn at once
# Where the halves of a block lie, with their factors: with random bytes elsewhere and a factor of 1 / sqrt(inputs),
# products have about the size of what is multiplied. Their standard deviations were computed from uniform codes.
HALVES = {Kind.Q4_K: {0: 1 / 258, 2: 7.5 / 258}, Kind.Q6_K: {208: 1 / 1370}}
NORMAL, CONTROL, UNUSED = 1, 3, 5  # kinds of tokens
Tensors = dict[str, tuple[tuple[int, ...], Kind]]  # shape and type by name


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and what its file states besides them."""

    architecture: str
    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int
    head: int = 128  # numbers of a head
    eps: float = 1e-6
    theta: float = 1e6  # of the rotary embedding
    context: int = 32768
    tied: bool = False  # whether the embedding is the output layer
    keys: Mapping[str, Any] = field(default_factory=dict)  # more keys of the architecture

    def metadata(self) -> dict[str, Any]:
        values = {
            "context_length": self.context,
            "block_count": self.layers,
            "feed_forward_length": self.inner,
            "embedding_length": self.width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.key_heads,
            "attention.layer_norm_rms_epsilon": self.eps,
            "attention.key_length": self.head,
            "attention.value_length": self.head,
            "rope.freq_base": self.theta,
            **self.keys,
        }
        return {"general.file_type": 15} | {f"{self.architecture}.{key}": value for key, value in values.items()}

    def tensors(self) -> Tensors:
        outer: Tensors = {"token_embd.weight": ((self.vocabulary, self.width), Kind.Q6_K if self.tied else Kind.Q4_K)}
        if not self.tied:
            outer["output.weight"] = (self.vocabulary, self.width), Kind.Q6_K
        elif self.architecture == "llama":  # the third generation, whose frequencies are divided
            outer["rope_freqs.weight"] = (self.head // 2,), Kind.F32
        outer["output_norm.weight"] = (self.width,), Kind.F32
        layers = (self._layer(f"blk.{number}.", self._finer(number)) for number in range(self.layers))
        return outer | {name: tensor for layer in layers for name, tensor in layer.items()}

    def _finer(self, layer: int) -> Kind:
        """Return the type of the sensitive matrices of a layer, by the rule of llama.cpp."""
        first = self.layers // 8
        fine = layer < first or layer >= 7 * self.layers // 8 or (layer - first) % 3 == 2
        return Kind.Q6_K if fine else Kind.Q4_K

    def _layer(self, prefix: str, finer: Kind) -> Tensors:
        queries, keys, width = self.heads * self.head, self.key_heads * self.head, self.width
        vectors = {"attn_norm.weight": width, "ffn_norm.weight": width}
        if self.architecture == "gemma3":
            sizes = {"post_attention": width, "post_ffw": width, "attn_q": self.head, "attn_k": self.head}
            vectors |= {f"{part}_norm.weight": size for part, size in sizes.items()}
        if self.architecture == "qwen2":
            vectors |= {"attn_q.bias": queries, "attn_k.bias": keys, "attn_v.bias": keys}
        matrices = {"attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width)}
        matrices |= {"attn_output": (width, queries), "ffn_gate": (self.inner, width)}
        matrices |= {"ffn_up": (self.inner, width), "ffn_down": (width, self.inner)}
        kinds = {"attn_v": finer, "ffn_down": finer}
        layer: Tensors = {f"{prefix}{name}": ((size,), Kind.F32) for name, size in vectors.items()}
        return layer | {f"{prefix}{name}.weight": (one, kinds.get(name, Kind.Q4_K)) for name, one in matrices.items()}


GEMMA_3 = {"attention.sliding_window": 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
SHAPES = {
    "llama3.2-3b": Shape("llama", 28, 3072, 8192, 24, 8, 128256, 128, 1e-5, 5e5, 131072, tied=True),
    "gemma3-4b": Shape("gemma3", 34, 2560, 10240, 8, 4, 262144, 256, 1e-6, 1e6, 131072, tied=True, keys=GEMMA_3),
    "mistral-7b": Shape("llama", 32, 4096, 14336, 32, 8, 32768, eps=1e-5),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 18944, 28, 4, 152064),
}


def write_shape(shape: Shape, path: Path, borrowed: Mapping[str, Any] | None = None) -> None:
    """Write a file of a shape, a few megabytes at a time.

    Args:
        borrowed: metadata of a GGUF file whose tokenizer is taken; without it, tokens are bytes and pairs of them.

    Raises:
        UsageError: there is too little space, or the shape has fewer tokens.
    """
    tensors, metadata = shape.tensors(), shape.metadata() | _make_tokenizer(shape.vocabulary, borrowed)
    free, size = shutil.disk_usage(path.absolute().parent).free, sum(_count_bytes(*one) for one in tensors.values())
    if free < 1.1 * size:
        raise UsageError(f"{path} needs {size / 1e9:.1f} GB of disk, but {free / 1e9:.1f} GB are free; free some")
    writer, rng = gguf.GGUFWriter(path, shape.architecture), np.random.default_rng(0)
    for key, value in metadata.items():
        writer.add_key_value(key, value, Form.UINT32 if type(value) is int else Form.get_type(value))
    for name, (dimensions, kind) in tensors.items():
        writer.add_tensor_info(name, dimensions, np.dtype(np.float32), _count_bytes(dimensions, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    for name, (dimensions, kind) in tensors.items():
        vector = kind == Kind.F32
        for part in [_make_vector(shape, name, *dimensions)] if vector else _draw_blocks(dimensions, kind, rng):
            file.write(part.tobytes())
        writer.write_padding(file, _count_bytes(dimensions, kind))
    writer.close()


def _count_bytes(dimensions: tuple[int, ...], kind: Kind) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return prod(dimensions) // block * size


def _make_vector(shape: Shape, name: str, size: int) -> np.ndarray[Any, Any]:
    """Return norms of 1, biases of 0, or Llama 3's divisors of the frequencies."""
    if name != "rope_freqs.weight":
        return np.full(size, float(name.endswith("norm.weight")), np.float32)
    waves = 2 * np.pi * shape.theta ** (np.arange(size) / size)
    smooth = ((8192 / waves - 1) / 3).clip(0, 1)
    return np.asarray(1 / ((1 - smooth) / 32 + smooth), np.float32)


def _draw_blocks(dimensions: tuple[int, ...], kind: Kind, rng: np.random.Generator) -> Iterator[np.ndarray[Any, Any]]:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = _count_bytes(dimensions, kind) // size
    for begin in range(0, blocks, TILE):
        tile = rng.integers(0, 256, (min(TILE, blocks - begin), size), np.uint8)
        for place, factor in HALVES[kind].items():
            tile[:, place : place + 2] = np.frombuffer(np.float16(factor / dimensions[1] ** 0.5).tobytes(), np.uint8)
        yield tile


def _make_tokenizer(size: int, borrowed: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer of that size."""
    if borrowed is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pairs = list(product(alphabet, alphabet))[: size - len(alphabet) - 1]
        tokens = ["<|endoftext|>", *alphabet, *map("".join, pairs)]
        own = {"model": "gpt2", "pre": "qwen2", "merges": [" ".join(pair) for pair in pairs], "eos_token_id": 0}
        own |= {"tokens": tokens, "token_type": [CONTROL, *[NORMAL] * (len(tokens) - 1)]}
        found: dict[str, Any] = {f"tokenizer.ggml.{key}": value for key, value in own.items()}
    else:
        found = {key: value for key, value in borrowed.items() if key.startswith("tokenizer.")}
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    if len(tokens) > size:
        raise UsageError(f"the tokenizer must have at most {size:,} tokens, but has {len(tokens):,}; name another file")
    found["tokenizer.ggml.tokens"] = [*tokens, *(f"[UNUSED{number}]" for number in range(len(tokens), size))]
    found["tokenizer.ggml.token_type"] = [*kinds, *[UNUSED] * (size - len(kinds))]
    return found


def shapes(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    file: Annotated[Path, typer.Argument(help="File to write.")],
    tokenizer: Annotated[Path | None, typer.Option(help="GGUF file whose tokenizer is taken.")] = None,
) -> None:
    """Write a GGUF file with the sizes of a model and random weights."""
    if name not in SHAPES:
        raise UsageError(f"a shape must be one of {', '.join(SHAPES)}, got '{name}'")
    write_shape(SHAPES[name], file, read_gguf(tokenizer).metadata if tokenizer else None)


if __name__ == "__main__":
    run(shapes)
