"""GGUF files that are no language model, or cannot be read: each is named for what it is, by the command as well."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_making import write
from typer.testing import CliRunner

import pipeline
from pipeline.cli.app import app
from stages.engine.checkpoints.gguf_file import find_gguf, forget_headers, read_gguf
from stages.engine.models.huggingface import load_causal_model, load_tokenizer
from store.errors import ModelError

VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 0,
}
WEIGHTS = {"token_embd.weight": np.zeros((3, 32), dtype=np.float32)}


def write_plain(path: Path, architecture: str = "llama", weights: dict[str, Any] = WEIGHTS, **keys: Any) -> None:
    write(path, architecture, {**VOCABULARY, **{key.replace("__", "."): value for key, value in keys.items()}}, weights)


def write_without_architecture(path: Path, kind: str | None = None, **others: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for keys in writer.kv_data:
        keys.pop("general.architecture")
    if kind:
        writer.add_string("general.type", kind)
    for name, value in others.items():
        writer.add_string(name.replace("__", "."), value)
    writer.add_tensor("blk.0.attn_k.weight.in_sum2", np.zeros((1, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_other_header(path: Path, form: str, version: int) -> None:
    path.write_bytes(b"GGUF" + struct.pack(form, version) + bytes(64))


def write_big_endian(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_context_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_cut_off(path: Path, share: float) -> None:
    write_plain(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])


# Per file how it is written, and how it is refused; a vocabulary alone is only refused as a model.
FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "vocabulary": (lambda path: write_plain(path, weights={}), "must hold weights, but has only a vocabulary"),
    "no architecture": (write_without_architecture, "does not state general.architecture"),
    "nothing": (lambda path: write(path, "llama", {}, {}), "must hold weights, but has no tensors"),
    "adapter": (lambda path: write_plain(path, general__type="adapter"), r"is an adapter \(LoRA\)"),
    "older adapter": (lambda path: write_without_architecture(path, adapter__type="lora"), r"is an adapter \(LoRA\)"),
    "importance matrix": (lambda path: write_without_architecture(path, "imatrix"), "is an importance matrix"),
    "older matrix": (lambda path: write_without_architecture(path, imatrix__set="a"), "is an importance matrix"),
    "projector": (lambda path: write_plain(path, "clip", general__type="mmproj"), "is the projector of a model"),
    "older projector": (lambda path: write_plain(path, "clip"), "is the projector of a model"),
    "draft head": (lambda path: write_plain(path, "eagle3"), "is a draft head"),
    "bert": (lambda path: write_plain(path, "bert", attention__causal=False), "architecture bert for embeddings"),
    "embeddings": (lambda path: write_plain(path, "qwen3", pooling_type=3), "architecture qwen3 for embeddings"),
    "big-endian": (write_big_endian, r"is big-endian; gguf-convert-endian .* little"),
    "version 0": (lambda path: write_other_header(path, "<I", 0), "version 2 or 3, but is of 0"),
    "version 1": (lambda path: write_other_header(path, "<I", 1), "version 2 or 3, but is of 1"),
    "version 4": (lambda path: write_other_header(path, "<I", 4), "version 2 or 3, but is of 4"),
    "cut off in the header": (lambda path: write_cut_off(path, 0.3), "is cut off or damaged"),
    "cut off in the weights": (lambda path: write_cut_off(path, 0.95), "is cut off or damaged"),
    "empty": (lambda path: path.write_bytes(b""), "must be a GGUF file, but cannot be read"),
    "text": (lambda path: path.write_text("version https://git-lfs"), "does not begin with 'GGUF'"),
}  # fmt: skip


@pytest.fixture(params=FILES)
def refused(request, tmp_path: Path) -> tuple[str, Path, str]:
    """The name of a case, its file, and the pattern of its refusal."""
    make, pattern = FILES[request.param]
    make(tmp_path / "m.gguf")
    return request.param, tmp_path / "m.gguf", pattern


def test_a_loader_names_what_a_file_is(refused):
    name, path, pattern = refused
    loaders: list[Callable[[], Any]] = [lambda: load_causal_model(str(path), "float32", "cpu", codes=True)]
    if name not in ("vocabulary", "nothing"):
        loaders.append(lambda: load_tokenizer(str(path)))
    for load in loaders:
        with pytest.raises(ModelError, match=pattern) as error:
            load()
        message = str(error.value)
        assert "\n" not in message
        assert "KeyError" not in message
        assert message.startswith(str(path))
        assert "; " in message, "what to try"


@pytest.mark.representatives("vocabulary", "adapter", "bert", "big-endian")
def test_the_command_and_the_interface_name_what_a_file_is(refused, tmp_path: Path):
    _, path, pattern = refused
    run = ["--limit", "1", "--run", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["replay", "builtin:docs", "--target", str(path), *run])
    assert isinstance(done.exception, ModelError)
    with pytest.raises(ModelError, match=pattern) as error:
        pipeline.replay("builtin:docs", target=str(path), run=tmp_path / "other", source={"limit": 1})
    assert str(done.exception) == str(error.value)


def test_a_folder_without_a_model_names_what_it_has(tmp_path: Path):
    write_plain(tmp_path / "mmproj-f16.gguf", "clip")
    with pytest.raises(ModelError, match=r"must have a GGUF file of a model, but has mmproj-f16\.gguf alone"):
        load_causal_model(str(tmp_path), "float32", "cpu")
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(str(tmp_path)) is None


def test_a_file_is_read_once_until_it_changes(tmp_path: Path):
    path = tmp_path / "model.gguf"
    write_plain(path)
    first = read_gguf(path)
    assert read_gguf(path) is first
    write_plain(path, "qwen2")
    assert read_gguf(path).architecture == "qwen2"
    second = read_gguf(path)
    forget_headers()
    assert read_gguf(path) is not second
