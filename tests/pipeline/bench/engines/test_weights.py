"""Weights for other engines: read with their shape and written as GGUF files; the request to an engine."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replaying import config_of
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.assembly.models import load_models
from pipeline.bench.engines.gguf import _pair_rotary_rows, _tensors, _write_tokenizer, name_quantisation, save_gguf
from pipeline.bench.engines.weights import load_llama, request_of
from stages.engine.models.huggingface import load_tokenizer, new_llama
from store.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")


def test_weights_are_read_with_the_shape(tiny_pair: TinyPair):  # noqa: F811
    llama = load_llama(str(tiny_pair.target))
    assert (llama.layers, llama.width, llama.heads, llama.pairs, llama.head, llama.mlp) == (2, 48, 2, 1, 24, 96)
    assert "lm_head.weight" not in llama.weights, "it is the embedding"
    names = dict(_tensors(llama))
    assert len(names) == 2 + 2 * 9
    assert names["blk.1.ffn_up.weight"].shape == (96, 48)


def test_another_kind_of_llama_is_refused(tmp_path: Path):
    biased = new_llama(
        0, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9, mlp_bias=True
    )
    biased.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="leave these engines out"):
        load_llama(str(tmp_path))


def test_rows_of_heads_are_paired_for_neighbouring_rotation():
    rows = torch.arange(8)[:, None].numpy()  # two heads of four
    assert _pair_rotary_rows(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


class Recorded(dict[str, Any]):
    """A test double of a GGUF writer that records what it receives."""

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.__setitem__(name.removeprefix("add_"), value)


def test_tokenizers_are_converted_for_llama_cpp(tiny_pair: TinyPair):  # noqa: F811
    written: dict[str, Mapping[str, Any]] = {}
    for name, folder in (("target", tiny_pair.target), ("drafter", tiny_pair.drafter)):
        llama, record = load_llama(str(folder)), Recorded()
        _write_tokenizer(record, llama.tokenizer, llama.vocabulary + 1, [7, 9])
        assert record["token_list"][:3] == ["<unk>", "<s>", "</s>"]
        assert record["token_types"][:3] == [2, 3, 3]
        assert record["token_types"][-1] == 5
        assert (record["bos_token_id"], record["eos_token_id"]) == (1, 7), "the first end is that of the model"
        assert record["eot_token_id"] == 9
        assert "eom_token_id" not in record
        written[name] = record
    assert (written["target"]["tokenizer_model"], written["target"]["tokenizer_pre"]) == ("gpt2", "gpt-2")
    assert written["target"]["token_merges"][0].count(" ") == 1
    assert written["drafter"]["tokenizer_model"] == "llama"
    scores = dict(zip(written["drafter"]["token_list"], written["drafter"]["token_scores"], strict=True))
    state = json.loads(load_tokenizer(str(tiny_pair.drafter)).backend_tokenizer.to_str())
    learned = ["".join(merge) for merge in state["model"]["merges"]]
    assert [scores[piece] for piece in learned] == [-float(learned.index(piece)) for piece in learned]
    assert scores["<s>"] == -len(learned), "below every learned token"
    types = dict(zip(written["drafter"]["token_list"], written["drafter"]["token_types"], strict=True))
    assert types["<0x0A>"] == 6


@needs_gguf
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_gguf_file_holds_every_weight(tiny_pair: TinyPair, tmp_path: Path, dtype: str, width: int):  # noqa: F811
    import gguf

    llama = load_llama(str(tiny_pair.target))
    save_gguf(llama, tmp_path / "model.gguf", dtype, [2])
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert found.keys() == dict(_tensors(llama)).keys()
    assert found["blk.0.ffn_down.weight"].n_bytes == 48 * 96 * width
    assert found["output_norm.weight"].n_bytes == 48 * 4
    assert name_quantisation(tmp_path / "model.gguf") == {4: "F32", 2: "BF16"}[width]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_run_in_the_type_of_the_target(tiny_pair: TinyPair, tmp_path: Path, dtype: str):  # noqa: F811
    models = load_models(config_of(tiny_pair, dtype=dtype), "", tmp_path)[0]
    assert request_of(config_of(tiny_pair, dtype="auto"), models, tmp_path, 60).dtype == dtype


def test_a_type_that_other_engines_do_not_have_is_refused(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    config = config_of(tiny_pair, dtype="float32")
    models = load_models(config, "", tmp_path)[0]
    models.target.model.double()
    with pytest.raises(ModelError, match="is float64; set the dtype"):
        request_of(config, models, tmp_path, 60)


def test_the_context_of_engines_is_that_of_the_longest_prompt_in_whole_steps(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    config = config_of(tiny_pair, dtype="float32")
    models = load_models(config, "", tmp_path)[0]
    assert request_of(config, models, tmp_path, 60).longest == min(256, models.target.max_length)
    assert request_of(config, models, tmp_path, 100_000).longest == models.target.max_length


def test_the_end_of_the_vocabulary_is_the_first_of_several(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    config = config_of(tiny_pair, dtype="float32")
    models = load_models(config, "", tmp_path)[0]
    end = models.target_vocabulary.eos
    assert end is not None
    models.target.model.generation_config.eos_token_id = [end - 1, end, end + 1]
    assert request_of(config, models, tmp_path, 60).ends == (end, end - 1, end + 1)
