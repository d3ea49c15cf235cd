"""What is loaded of a drafter: the version that an alias means when the run begins, and the acceptance head."""

import threading
from types import SimpleNamespace

import pytest
import torch

from pipeline.assembly.models import pin_version
from pipeline.assembly.stages import make_head
from stages.engine.models.huggingface import MAKING_MODULES
from store.errors import ModelError


@pytest.fixture
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ((1, ()), (7, ("champion", "candidate")))
    versions = [SimpleNamespace(number=number, label=f"run/{number}", aliases=aliases) for number, aliases in known]
    monkeypatch.setattr("store.registry.registry.list_versions", lambda uri, name: versions)


@pytest.mark.usefixtures("_versions")
@pytest.mark.parametrize(
    ("name", "pinned"),
    [
        ("models:/drafter@champion", "models:/drafter/7"),
        ("models:/drafter/1", "models:/drafter/1"),
        ("builtin:drafter-1.6m", "builtin:drafter-1.6m"),
        ("owner/name", "owner/name"),
    ],
)
def test_an_alias_becomes_a_number_and_other_names_stay(name: str, pinned: str):
    assert pin_version(name, "uri") == pinned


@pytest.mark.usefixtures("_versions")
def test_an_alias_that_no_version_has_is_refused_with_those_that_there_are():
    with pytest.raises(ModelError, match="champion"):
        pin_version("models:/drafter@best", "uri")


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
