"""Absurd sizes are refused before a model is built, and so are models that do not fit into memory."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from tiny_pair import TinyPair
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.model_building import recipes
from benchmarks.model_building.shapes import SHAPES, write_shape
from stages.engine.checkpoints import size_check
from stages.engine.checkpoints.size_check import (
    estimate_memory,
    measure_files,
    require_memory,
    require_plausible_sizes,
)
from stages.engine.models import huggingface
from store.errors import ModelError


@pytest.fixture
def folder(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A copy of a small model."""
    return Path(shutil.copytree(tiny_pair.target, tmp_path / "model"))


def check(folder: Path, **changes: Any) -> None:
    """Check a model with a changed configuration, as the loader does."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    config: Any = AutoConfig.from_pretrained(folder)
    require_plausible_sizes(str(folder), config.to_dict(), lambda: AutoModelForCausalLM.from_config(config))


def test_a_sound_model_passes(folder: Path):
    check(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors, size = measure_files(folder)
    assert tensors >= len(list(model.parameters())) - 1, "embedding and output may be one"
    assert size > 0


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts"], ids=["layers", "experts"])
def test_more_modules_than_tensors_are_never_built(folder: Path, key: str):
    def build() -> None:
        pytest.fail("it was built")

    with pytest.raises(ModelError, match=rf"{key} = 1,000,000 and its files hold [0-9]+ tensors"):
        require_plausible_sizes(str(folder), {key: 1_000_000}, build)
    with pytest.raises(ModelError, match=rf"{key} = 1,000,000"):
        require_plausible_sizes(str(folder), {"text_config": {key: 1_000_000}}, build)


@pytest.mark.parametrize("changes", [{"vocab_size": 10**9}, {"intermediate_size": 10**9}], ids=["vocabulary", "width"])
def test_far_more_weights_than_the_files_hold_are_refused(folder: Path, changes: dict[str, int]):
    with pytest.raises(ModelError, match=r"needs [0-9,]+ weights \([0-9,]+ GiB in float32\) and its files have"):
        check(folder, **changes)


def test_a_shape_that_is_a_little_off_is_left_to_the_loader(folder: Path):
    check(folder, intermediate_size=3000)


def test_experts_need_no_tensors_of_their_own(folder: Path):
    """Doge names 16,384 of them in its configuration even where it has none."""
    check(folder, num_experts=16_384)


def test_without_files_to_compare_with_nothing_is_refused(folder: Path):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert measure_files(folder) == (0, 0)
    require_plausible_sizes(str(folder), {"num_hidden_layers": 10**9}, lambda: pytest.fail("it was built"))


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{{"])
def test_files_that_hold_no_tensors_count_none(folder: Path, content: bytes):
    for path in folder.glob("*.safetensors"):
        path.write_bytes(content)
    assert measure_files(folder)[0] == 0


def test_a_model_that_cannot_be_built_is_left_to_the_loader(folder: Path):
    def build() -> None:
        raise ValueError("no such activation")

    require_plausible_sizes(str(folder), {"num_hidden_layers": 2}, build)
    require_plausible_sizes("no/such model", {"num_hidden_layers": 10**9}, build)


def write_system(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 7000000 kB\nHugePages_Total: 0\n"}
GROUP = {
    "sys/fs/cgroup/memory.max": "5000000000\n",
    "sys/fs/cgroup/memory.current": "4000000000\n",
    "sys/fs/cgroup/memory.stat": "anon 1000000000\ninactive_file 2000000000\nactive_file 500000000\n",
}
OLD_GROUP = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000000\n",
}
UNLIMITED = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "4000000000\n"}


@pytest.mark.parametrize(
    ("files", "gigabytes"),
    [
        (MEMINFO, 7.168),
        (MEMINFO | GROUP, 3.5),
        (MEMINFO | OLD_GROUP, 2),
        (MEMINFO | UNLIMITED, 7.168),
        (GROUP, 3.5),
    ],
    ids=["system", "group", "group of the first version", "group without a limit", "group alone"],
)
def test_models_must_fit_into_the_memory_that_is_left(files: dict[str, str], gigabytes: float, tmp_path: Path):
    root, fits = write_system(tmp_path, files), int(gigabytes * 1e9)
    require_memory({"small": fits // 4, "large": fits - fits // 4}, root)
    with pytest.raises(ModelError) as refused:
        require_memory({"small": fits, "large.gguf": 2 * fits}, root)
    assert str(refused.value).startswith(
        f"'large.gguf' must fit into memory, but about {3 * gigabytes:.1f} GB are needed and {gigabytes:.1f} GB are "
        "available; take a file of fewer bits"
    )


def test_nothing_is_refused_where_the_system_says_nothing_of_its_memory(tmp_path: Path):
    require_memory({"large": 1 << 60}, tmp_path)


def test_estimates_follow_the_numbers_and_their_types(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, size = measure_files(folder)
    numbers = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert size == pytest.approx(2 * numbers, rel=0.2), "bfloat16 and a header"
    assert estimate_memory(str(folder), "float32") == 6 * numbers, "modules, and packed as stored"
    assert estimate_memory(str(folder), "bfloat16") == estimate_memory(str(folder), "auto") == 4 * numbers
    assert estimate_memory("no/such model", "float32") == 0
    with monkeypatch.context() as patch:
        patch.setattr(size_check, "MAPPED_FROM", 0)
        assert estimate_memory(str(folder), "float32", mapped={"llama"}) == int(2.2 * numbers), "mapped"
        assert estimate_memory(str(folder), "auto", mapped={"llama"}) == 4 * numbers
        assert estimate_memory(str(folder), "float32", mapped={"gemma"}) == 6 * numbers
    shape = replace(SHAPES["qwen2.5-7b"], layers=1, width=256, inner=512, heads=2, key_heads=1, vocabulary=512)
    write_shape(shape, tmp_path / "tiny.gguf")
    bits = (tmp_path / "tiny.gguf").stat().st_size
    assert 0.8 * bits < estimate_memory(str(tmp_path / "tiny.gguf"), "auto") < 1.2 * bits
    numbers = sum(prod(dimensions) for dimensions, _ in shape.tensors().values())
    assert estimate_memory(str(tmp_path / "tiny.gguf"), "auto", trained=True) > 4 * numbers


LOAD = """
import re, sys
from pathlib import Path
from stages.engine.models.language_model import load_model
def read(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
small, large = sys.argv[1:]
load_model(small, "float32", "cpu", "auto").prove_forward()
before = read("VmRSS")
load_model(large, "float32", "cpu", "auto").prove_forward()
print(read("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_model_takes_about_what_is_estimated(kind: str, folder: Path, tmp_path: Path):
    small, large = folder, tmp_path / f"large.{kind}"
    if kind == "gguf":
        small, sizes = tmp_path / "small.gguf", {"width": 1024, "inner": 4096, "heads": 8, "key_heads": 2}
        write_shape(replace(SHAPES["qwen2.5-7b"], layers=3, vocabulary=400, **sizes), small)
        write_shape(replace(SHAPES["qwen2.5-7b"], layers=4, vocabulary=32000, **sizes), large)
        mapped = large.stat().st_size
    else:
        shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
        model = huggingface.new_llama(0, vocab_size=8000, **shape)
        recipes.save(large, model, AutoTokenizer.from_pretrained(folder))
        _, mapped = measure_files(large)
    command = [sys.executable, "-c", LOAD, str(small), str(large)]
    taken = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    estimated = estimate_memory(str(large), "float32")
    assert 0.8 * estimated < taken < 1.25 * (estimated + mapped), "pages of the file count until the system drops them"
