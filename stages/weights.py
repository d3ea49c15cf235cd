"""What learning changes, on its way from where it is learned to where it is in service."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stages.head import AcceptanceHead
from stages.language_model import LanguageModel


@dataclass(frozen=True)
class Weights:
    """The drafter and its head at one moment.

    Attributes:
        drafter: as `LanguageModel.learning`, in float32.
        head: by name.
        drafter_version, head_version: updates that they contain.
    """

    drafter: tuple[Tensor, ...]
    head: Mapping[str, Tensor]
    drafter_version: int
    head_version: int


def taken_out(drafter: LanguageModel, head: AcceptanceHead, drafter_version: int, head_version: int) -> Weights:
    """A copy of what is in service."""
    copied = tuple(weight.detach().to("cpu", torch.float32, copy=True) for weight in drafter.learning)
    of_head = {name: weight.detach().to("cpu", copy=True) for name, weight in head.state_dict().items()}
    return Weights(copied, of_head, drafter_version, head_version)


def put_into_service(weights: Weights, drafter: LanguageModel, head: AcceptanceHead) -> None:
    """Serve these from the next pass on."""
    drafter.serve(weights.drafter)
    head.load_state_dict(dict(weights.head))


def write_weights(weights: Weights, path: Path) -> None:
    """As a safetensors file, which another process reads without copying it."""
    tensors = {f"drafter.{number:06d}": weight for number, weight in enumerate(weights.drafter)}
    tensors |= {f"head.{name}": weight for name, weight in weights.head.items()}
    versions = {"drafter_version": str(weights.drafter_version), "head_version": str(weights.head_version)}
    save_file(tensors, path, metadata=versions)


def read_weights(path: Path) -> Weights:
    """What `write_weights` wrote."""
    with safe_open(path, framework="pt") as file:
        versions = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    drafter = tuple(tensors[name] for name in sorted(tensors) if name.startswith("drafter."))
    head = {name.removeprefix("head."): weight for name, weight in tensors.items() if name.startswith("head.")}
    return Weights(drafter, head, int(versions["drafter_version"]), int(versions["head_version"]))
