"""A configuration with absurd sizes is refused before a model is built of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import TinyPair
from transformers import AutoConfig, AutoModelForCausalLM

from stages.engine.checkpoints.size_check import measure_files, require_plausible_sizes
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
