"""The acceptance head of a pair."""

import threading
from types import SimpleNamespace

import torch

from pipeline.assembly.stages import make_head
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
