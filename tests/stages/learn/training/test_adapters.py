"""Adapters: several over one drafter, independent of each other, saved as peft saves them."""

from pathlib import Path

import pytest
import torch
from test_drafter_trainer import BACKWARD, COUNTING, SHAPE, VOCABULARY, update, weights
from tokenizer_making import byte_level
from torch import Tensor

from stages.engine.models.adapters import (
    ADAPTER_FOLDER,
    add_adapter,
    merge_lora,
    read_adapter,
    strip_adapters,
)
from stages.engine.models.huggingface import load_causal_model, new_llama
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.losses import expected_acceptance, trie_loss
from stages.learn.training.drafter_trainer import DrafterTrainer
from stages.learn.training.update import TrainingConfig
from store.errors import ModelError

RANK = 4
TEXT = torch.tensor([[0, 1, 2, 3, 4, 5]])
TRAINING = TrainingConfig(1e-2, 0.0, steps=2, clip=1.0, replay=4, gate_window=4, gate_tolerance=1.0, seed=0)


def new_model() -> LanguageModel:
    return LanguageModel(new_llama(1, vocab_size=VOCABULARY, **SHAPE), "tiny")


def two_on_one() -> tuple[LanguageModel, LanguageModel, LanguageModel]:
    """A bare drafter, and the drafter of two targets on its modules, which now hold two adapters."""
    bare, runners = new_model(), []
    for name in ("one", "other"):
        add_adapter(bare.model, name, RANK, seed=0)
        runners.append(LanguageModel(bare.model, "tiny", name))
    return new_model(), runners[0], runners[1]


def trainer_of(model: LanguageModel) -> DrafterTrainer:
    return DrafterTrainer(model, "trie", trie_loss, expected_acceptance, {"one": range(VOCABULARY)}, TRAINING)


@torch.no_grad()
def read(model: LanguageModel) -> Tensor:
    return model.read(TEXT)


def copies(model: LanguageModel) -> list[Tensor]:
    return [weight.detach().clone() for weight in model.trained_weights]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def base_of(model: LanguageModel) -> list[Tensor]:
    return [weight.clone() for name, weight in model.model.named_parameters() if ".lora_" not in name]


@pytest.fixture
def trained() -> tuple[LanguageModel, LanguageModel, LanguageModel]:
    """The models of `two_on_one`, after the first target's adapter has learned."""
    bare, one, other = two_on_one()
    trainer = trainer_of(one)
    for _ in range(8):
        assert update(trainer, [COUNTING]).served
    return bare, one, other


def test_a_new_adapter_changes_nothing():
    bare, one, other = two_on_one()
    assert torch.equal(read(one), read(bare))
    assert torch.equal(read(other), read(bare))


def test_training_one_adapter_leaves_the_other_and_the_base_as_they_were():
    bare, one, other = two_on_one()
    base, others, before = base_of(one), copies(other), copies(one)
    trainer = trainer_of(one)
    for _ in range(5):
        assert update(trainer, [COUNTING]).served
    assert not same(copies(one), before)
    assert same(copies(other), others)
    assert same(base_of(one), base)
    assert same(base, weights(bare.model))
    assert torch.equal(read(other), read(bare))


def test_adapters_learn_at_the_same_time_each_its_own_example():
    """In turn, as runners do; each ends where it ends when it learns alone."""
    _, one, other = two_on_one()
    trainers = [trainer_of(one), trainer_of(other)]
    for _ in range(4):
        for trainer, example in zip(trainers, (COUNTING, BACKWARD), strict=True):
            update(trainer, [example])
    for place, example in ((1, COUNTING), (2, BACKWARD)):
        alone = two_on_one()[place]
        trainer = trainer_of(alone)
        for _ in range(4):
            update(trainer, [example])
        assert same(copies((one, other)[place - 1]), copies(alone))
    assert not torch.allclose(read(one), read(other), atol=1e-2)


def test_rows_are_read_with_the_adapter_of_their_model(trained):
    from doubles import row_of

    _, one, other = trained
    for model in (one, other):
        row = row_of(TEXT[0].tolist())
        model.admit(row, row.tokens)
        (other if model is one else one).read(TEXT)
        logits_NV, _ = model.forward([row], [row.tokens[-1:]], [1])
        torch.testing.assert_close(logits_NV[-1], read(model)[0, -1], atol=1e-5, rtol=1e-5)


def test_the_model_without_adapters_shares_the_weights_and_has_no_trace_of_them(trained):
    bare, one, _ = trained
    found = strip_adapters(one.model)
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in bare.model.named_parameters()]
    base = {tensor.data_ptr() for name, tensor in one.model.named_parameters() if ".lora_" not in name}
    assert {tensor.data_ptr() for tensor in found.parameters()} == base
    assert not hasattr(found, "peft_config")
    assert torch.equal(read(LanguageModel(found, "bare")), read(bare))
    assert float((read(one) - read(bare)).abs().max()) > 0.1, "the adapter is still there"


@pytest.fixture
def saved(trained, tmp_path: Path) -> Path:
    """A version's folder of the first target."""
    trained[1].save(tmp_path / "version", byte_level([]))
    return tmp_path / "version"


def test_a_saved_drafter_is_the_bare_one_with_the_adapter_in_a_folder(trained, saved: Path):
    assert {path.name for path in (saved / ADAPTER_FOLDER).iterdir()} >= {"adapter_model.safetensors"}
    loaded = LanguageModel(load_causal_model(str(saved), "float32", "cpu"), "saved")
    assert torch.equal(read(loaded), read(trained[0]))


def test_peft_loads_a_saved_adapter_over_the_bare_drafter(trained, saved: Path):
    from peft import PeftModel

    bare = load_causal_model(str(saved), "float32", "cpu")
    loaded = PeftModel.from_pretrained(bare, str(saved / ADAPTER_FOLDER)).eval()
    with torch.no_grad():
        logits_BTV = loaded(input_ids=TEXT).logits
    torch.testing.assert_close(logits_BTV, read(trained[1]), atol=1e-6, rtol=1e-6)


def test_a_saved_adapter_can_be_merged_into_the_drafter(trained, saved: Path):
    merged = LanguageModel(load_causal_model(str(saved), "float32", "cpu"), "merged")
    merge_lora(merged.model, str(saved / ADAPTER_FOLDER))
    torch.testing.assert_close(read(merged), read(trained[1]), atol=1e-5, rtol=1e-5)
    assert [name for name, _ in merged.model.named_parameters()] == [n for n, _ in trained[0].model.named_parameters()]
    assert not hasattr(merged.model, "peft_config")
    learner = trainer_of(LanguageModel(merged.model, "merged"))
    assert update(learner, [BACKWARD]).served, "and all of it learns on"


def test_an_adapter_of_another_rank_is_refused_with_what_to_set(saved: Path):
    model = new_model()
    add_adapter(model.model, "one", RANK + 1, seed=0)
    with pytest.raises(ModelError, match=r"same rank.*lora_rank"):
        read_adapter(model.model, "one", saved / ADAPTER_FOLDER)
