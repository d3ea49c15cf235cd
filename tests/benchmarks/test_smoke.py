"""The benchmark of speed on a tiny pair, and files of the shapes of models."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from places import ROOT
from tiny_pair import TinyPair

from benchmarks.model_building.shapes import SHAPES, write_shape
from benchmarks.speed.__main__ import bench
from stages.engine.checkpoints.gguf_file import read_gguf
from stages.engine.models.huggingface import load_causal_model, load_tokenizer
from store.errors import UsageError

COMMANDS = ("speed", "engines", "server", "studies", "model_building", "model_building.shapes", "vllm")


def test_the_arms_of_the_speed_benchmark_agree(tiny_pair: TinyPair, tmp_path: Path):
    results = tmp_path / "results.json"
    bench(
        sources=[str(tiny_pair.sums)],
        target=str(tiny_pair.target),
        drafter=str(tiny_pair.drafter),
        prompts=4,
        round_prompts=2,
        warm_up=2,
        max_new_tokens=8,
        settings=["device=cpu"],
        arms="plain,own-plain,memory,logged",
        json_file=results,
    )
    (run,) = json.loads(results.read_text())["runs"]
    assert list(run["arms"]) == ["plain", "own-plain", "memory", "logged"]
    assert run["rounds"] == {"complete": 2, "planned": 2}
    assert {found["differing"] for found in run["arms"].values()} == {0}
    assert run["arms"]["own-plain"]["block_efficiency"] == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_is_a_command(name: str):
    words = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Usage: " in done.stdout


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_a_shape_loads_as_a_model_that_computes(name: str, tmp_path: Path):
    shape = replace(SHAPES[name], layers=4, width=256, inner=512, heads=2, key_heads=1, vocabulary=600)
    write_shape(shape, tmp_path / "tiny.gguf")
    model = load_causal_model(str(tmp_path / "tiny.gguf"), "float32", "cpu")
    with torch.inference_mode():
        logits_TV = model(input_ids=torch.arange(40)[None]).logits[0]
    assert logits_TV.std().item() == pytest.approx(1, rel=0.2), "sums keep the size of what is multiplied"
    kinds = Counter(tensor.kind for tensor in read_gguf(tmp_path / "tiny.gguf").tensors.values() if tensor.shape[1:])
    fine = 2 * 2 + 1  # values and the last matrix of layers 2 and 3, and the output layer
    assert kinds == {Kind.Q6_K: fine, Kind.Q4_K: 4 * 7 + 1 + (not shape.tied) - fine}


def test_a_file_of_a_shape_takes_another_file_s_tokens(tmp_path: Path):
    paths = [tmp_path / f"{number}.gguf" for number in range(2)]
    small = replace(SHAPES["qwen2.5-7b"], layers=1, width=256, inner=256, heads=2, key_heads=1, vocabulary=400)
    write_shape(small, paths[0])
    borrowed = read_gguf(paths[0]).metadata
    write_shape(replace(small, vocabulary=500), paths[1], borrowed)
    ids = [load_tokenizer(str(path))("the tokens, 3 of them")["input_ids"] for path in paths]
    assert ids[0] == ids[1]
    assert read_gguf(paths[1]).tensors["token_embd.weight"].shape == (500, 256)
    with pytest.raises(UsageError, match="at most 300 tokens, but has 400"):
        write_shape(replace(small, vocabulary=300), paths[1], borrowed)
