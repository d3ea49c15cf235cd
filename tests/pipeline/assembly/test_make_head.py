"""The acceptance head of a pair."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from pipeline.assembly.models import load_models
from pipeline.assembly.stages import make_head
from pipeline.assembly.training import HEAD_RATE, TRAINED_HEAD_RATE, make_distillers
from pipeline.config.settings import Config
from stages.distill import Distill
from stages.drafting.head import AcceptanceHead, save_head
from stages.engine.models.huggingface import MAKING_MODULES


def test_a_head_does_not_take_the_type_of_a_model_that_another_thread_loads():
    """While `from_pretrained` runs, its type is the default of the whole process."""
    loading, usual = threading.Event(), torch.get_default_dtype()

    def load() -> None:
        with MAKING_MODULES:
            torch.set_default_dtype(torch.bfloat16)
            loading.set()
            threading.Event().wait(0.2)
            torch.set_default_dtype(usual)

    thread = threading.Thread(target=load)
    thread.start()
    loading.wait(10)
    pair = SimpleNamespace(drafter=SimpleNamespace(hidden_size=8, device="cpu"), drafter_folder=None)
    head = make_head(pair, 0)  # type: ignore[arg-type]
    thread.join()
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}
    assert not head.came_trained


def learning_rate(folder: Path | None, config: Config) -> float:
    """The rate with which the head of a drafter in a folder is trained."""
    models = load_models(config, "", Path())
    pair = replace(models[0], drafter_folder=folder)
    (distill,) = make_distillers(config, [pair], [make_head(pair, 0)], 1.0)
    assert isinstance(distill, Distill)
    (group,) = distill.head._optimizer.param_groups
    return float(group["lr"])


def test_a_head_that_came_trained_is_changed_slowly(tmp_path: Path):
    config = Config().with_overrides({"targets": ("builtin:target-7m",), "device": "cpu"})
    models = load_models(config, "", tmp_path)
    save_head(AcceptanceHead(models[0].drafter.hidden_size, 1), tmp_path / "head.safetensors")
    assert learning_rate(None, config) == HEAD_RATE
    assert learning_rate(tmp_path, config) == TRAINED_HEAD_RATE
