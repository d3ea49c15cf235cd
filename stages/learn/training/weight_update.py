"""Trained weights on their way from the learner to the model in service."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.drafting.head import AcceptanceHead
from stages.engine.models.language_model import LanguageModel

NUMBERS = ("drafter_version", "head_version", "drifts")  # of `Weights`, in its order


@dataclass(frozen=True)
class Weights:
    """A copy of the weights of the drafter and its head."""

    drafter: tuple[Tensor, ...]  # as `LanguageModel.trained_weights`, in float32
    head: Mapping[str, Tensor]  # by name
    # drafter_version, head_version: number of updates that they contain
    drafter_version: int
    head_version: int
    drifts: int = 0  # number of drifts that the learner had responded to


def export_weights(
    drafter: LanguageModel, head: AcceptanceHead, drafter_version: int, head_version: int, drifts: int = 0
) -> Weights:
    """Copy the weights in service to the CPU."""
    copied = tuple(weight.detach().to("cpu", torch.float32, copy=True) for weight in drafter.trained_weights)
    of_head = {name: weight.detach().to("cpu", copy=True) for name, weight in head.state_dict().items()}
    return Weights(copied, of_head, drafter_version, head_version, drifts)


def apply_weights(weights: Weights, drafter: LanguageModel, head: AcceptanceHead) -> None:
    """Load weights into the models in service, from the next pass on."""
    drafter.load_weights(weights.drafter)
    head.load_state_dict(dict(weights.head))


def write_weights(weights: Weights, path: Path) -> None:
    """Write weights as a safetensors file, which another process maps into memory without a copy."""
    tensors = {f"drafter.{number:06d}": weight for number, weight in enumerate(weights.drafter)}
    tensors |= {f"head.{name}": weight for name, weight in weights.head.items()}
    versions = {name: str(getattr(weights, name)) for name in NUMBERS}
    save_file(tensors, path, metadata=versions)


def read_weights(path: Path) -> Weights:
    """Read a file that `write_weights` wrote."""
    with safe_open(path, framework="pt") as file:
        versions = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    drafter = tuple(tensors[name] for name in sorted(tensors) if name.startswith("drafter."))
    head = {name.removeprefix("head."): weight for name, weight in tensors.items() if name.startswith("head.")}
    return Weights(drafter, head, *(int(versions[name]) for name in NUMBERS))
