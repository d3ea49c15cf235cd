"""LoRA adapters: one small set of weights per target over one frozen drafter (paper, section 7).

Adapters are injected into the drafter's linear layers and not merged: lanes of several targets share the layers and
activate their own before every pass. The only file that imports `peft`, inside functions: it takes seconds to load.
"""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from store.errors import ModelError

ADAPTER_FOLDER = "adapter"
_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."  # peft's own names


def adapter_name(target: str) -> str:
    """A name that can stand inside the names of modules, is none of theirs, and differs where the targets' differ."""
    return "for_" + re.sub(r"[\W_]", lambda found: f"_{ord(found[0]):x}_", target)


def add_adapter(model: Any, name: str, rank: int, seed: int) -> None:
    """Inject an adapter that changes nothing yet (its second factor is zero) into every linear layer but the last.

    Raises:
        ModelError: if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError("adapters need peft: pip install 'omnidraft[lora]'; or leave out --lora") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several adapters in one model are what we want
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=name)
    activate(model, name)


def activate(model: Any, name: str) -> None:
    """Let the model compute with this adapter. Cheap when it does already."""
    if getattr(model, "active_omnidraft_adapter", None) == name:
        return
    for module in _adapted(model).values():
        module.set_adapter(name)
    model.active_omnidraft_adapter = name


def is_of(weight: str, name: str) -> bool:
    """Whether a parameter's name is that of one of the adapter's weights."""
    return f".{name}." in weight


def _adapted(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_base_layer")}


def without_adapters(model: Any) -> Any:
    """The bare model beside this one, on the same weights."""
    fixed = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    bare = copy.deepcopy(model, fixed)
    _strip(bare)
    return bare


def _strip(model: Any) -> None:
    """Put every adapted layer back in its place as it was, and forget the adapters."""
    for path, module in _adapted(model).items():
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module.get_base_layer())
    for left in ("peft_config", "active_omnidraft_adapter"):
        model.__dict__.pop(left, None)


def save_adapter(model: Any, name: str, folder: Path) -> None:
    """Write an adapter as peft does, so that `PeftModel.from_pretrained` loads it over the bare drafter."""
    folder.mkdir(parents=True)
    model.peft_config[name].save_pretrained(folder)
    own = {weight: tensor for weight, tensor in model.named_parameters() if is_of(weight, name)}
    save_file({_key(weight, name): tensor.detach().contiguous() for weight, tensor in own.items()}, folder / _WEIGHTS)


def _key(weight: str, name: str) -> str:
    return _PREFIX + weight.replace(f".{name}.", ".")


def read_adapter(model: Any, name: str, folder: Path) -> list[Tensor]:
    """The weights of a saved adapter, in the order of the model's own.

    Raises:
        ModelError: if it cannot be read, or was made for another drafter or another rank.
    """
    try:
        saved = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / _WEIGHTS} must hold the weights of an adapter, but: {error}") from error
    own = {_key(weight, name): tensor for weight, tensor in model.named_parameters() if is_of(weight, name)}
    shapes = {key: tensor.shape for key, tensor in saved.items()}
    if shapes != {key: tensor.shape for key, tensor in own.items()}:
        raise ModelError(
            f"the adapter in {folder} must have the shape of this drafter's (same layers, same rank); set "
            "learn.lora_rank as it was when the adapter was trained"
        )
    return [saved[key] for key in own]


@torch.no_grad()
def load_adapter(model: Any, name: str, folder: Path) -> None:
    """Put a saved adapter's weights into the injected one of that name. Raises as `read_adapter`."""
    own = [weight for key, weight in model.named_parameters() if is_of(key, name)]
    for weight, saved in zip(own, read_adapter(model, name, folder), strict=True):
        weight.copy_(saved)


def merge_saved_adapter(model: Any, folder: Path) -> None:
    """Add a saved adapter to the weights of a bare drafter, in place."""
    from peft import PeftConfig

    rank = PeftConfig.from_pretrained(str(folder)).r
    add_adapter(model, "saved", rank, 0)
    load_adapter(model, "saved", folder)
    for module in _adapted(model).values():
        module.get_base_layer().weight.data += module.get_delta_weight("saved")
    _strip(model)
