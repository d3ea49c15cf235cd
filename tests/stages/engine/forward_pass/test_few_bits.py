"""Models of few bits: the codes of a GGUF file, and weights that are quantised when they are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import read_in_steps
from gguf_making import keys_of, tensors_of, write
from torch import nn

from pipeline.assembly.models import load_models
from pipeline.config.settings import Config
from stages.engine.models.huggingface import load_causal_model, new_llama
from stages.engine.models.language_model import fingerprint, load_model
from stages.engine.quantisation.modules import find_attached, find_groups, has_groups
from store.errors import ConfigError

SHAPE = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def llama() -> Any:
    """A Llama with random weights whose matrices fit groups of 32."""
    return new_llama(3, initializer_range=0.2, **SHAPE)


@pytest.fixture(scope="module")
def folder(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    llama.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of three types, by type."""
    place, keys, tensors = tmp_path_factory.mktemp("files"), keys_of(llama.config), tensors_of(llama, "llama")
    return {kind: write(place / f"{kind}.gguf", "llama", keys, tensors, kind) for kind in ("Q4_0", "Q4_1", "Q8_0")}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_every_matrix_has_the_codes_of_its_weight(files: dict[str, Path], kind: str):
    """Rows of queries and keys are in another order in the file."""
    model = load_causal_model(str(files[kind]), "float32", "cpu", codes=True)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 3 * 7 + 1
    for linear in linears:
        groups = find_attached(linear)
        assert groups is not None
        assert torch.equal(groups.dequantise(), linear.weight)
    plain = load_causal_model(str(files[kind]), "float32", "cpu")
    assert not has_groups(plain)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_file_runs_in_its_own_bits_by_default(files: dict[str, Path], folder: Path):
    assert {load_model(str(path), "float32", "cpu", "auto").weights for path in files.values()} == {"codes"}
    assert load_model(str(folder), "float32", "cpu", "auto").weights == "fastest"
    assert load_model(str(files["Q4_1"]), "float32", "cpu", "fastest").weights == "fastest"
    assert load_model(str(files["Q4_1"]), "bfloat16", "cpu", "auto").weights == "fastest", "nothing is compiled for it"


def compare(one_TV: torch.Tensor, other_TV: torch.Tensor) -> float:
    """The root of the mean square of the differences, in standard deviations."""
    return float((one_TV - other_TV).square().mean().sqrt() / other_TV.std())


@pytest.mark.parametrize(("weights", "bits", "distance"), [("int4", 4, 0.1), ("int8", 8, 0.01)])
def test_a_checkpoint_is_quantised_when_it_is_loaded(folder: Path, weights: str, bits: int, distance: float):
    """It computes what its modules compute with the quantised weights, and its own weights stay."""
    model, plain = (load_model(str(folder), "float32", "cpu", kind) for kind in (weights, "fastest"))
    model.prove_forward()
    assert fingerprint(model) != fingerprint(plain)
    assert all(
        torch.equal(one, two) for one, two in zip(model.model.parameters(), plain.model.parameters(), strict=True)
    )
    text = list(range(5, 45))
    assert distance < compare(read_in_steps(model, text), read_in_steps(plain, text)) < 10 * distance
    quantised = load_causal_model(str(folder), "float32", "cpu")
    for linear in quantised.model.modules():  # the output layer is not quantised
        if isinstance(linear, nn.Linear):
            groups = find_groups(linear, bits, quantise=True)
            assert groups is not None
            linear.weight.data = groups.dequantise()
    with torch.no_grad():
        expected_TV = quantised(torch.tensor([text])).logits[0]
    assert compare(read_in_steps(model, text), expected_TV) < 0.2 * distance


def test_weights_that_training_changed_are_quantised_again(files: dict[str, Path]):
    model = load_model(str(files["Q4_1"]), "float32", "cpu", "int4", trained=True)
    text = list(range(5, 25))
    before_TV = read_in_steps(model, text)
    changed = [weight + 0.05 * torch.randn_like(weight) for weight in model.trained_weights]
    model.load_weights(changed)
    after_TV = read_in_steps(model, text)
    plain = load_model(str(files["Q4_1"]), "float32", "cpu", "fastest", trained=True)
    plain.load_weights(changed)
    assert compare(after_TV, read_in_steps(plain, text)) < 0.5 * compare(before_TV, read_in_steps(plain, text))


@pytest.mark.parametrize("key", ["weights", "draft.weights"])
def test_another_device_has_no_kernels_for_few_bits(key: str, tmp_path: Path):
    config = Config().with_overrides({"targets": ("never read",), "device": "meta", key: "int4"})
    with pytest.raises(ConfigError, match="weights in int4 are for the CPU alone, but the device is meta"):
        load_models(config, "", tmp_path)
