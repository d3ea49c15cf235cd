"""LoRA adapters: one small set of weights per target over one frozen drafter (paper, section 7).

Adapters are injected into the drafter's linear layers and not merged: runners of several targets share the layers and
activate their own before every pass. The only file that imports `peft`, inside functions: it takes seconds to load.
"""

import copy
import json
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
_CONFIG, _WEIGHTS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."  # peft's names


def adapter_name(target: str) -> str:
    """Return a name for a target's adapter: unique per target, valid inside module names, and no module's own name."""
    return "for_" + re.sub(r"[\W_]", lambda match: f"_{ord(match[0]):x}_", target)


def add_adapter(model: Any, name: str, rank: int, seed: int) -> None:
    """Inject an adapter that changes nothing yet (its second factor is zero) into every linear layer but the last."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError("adapters need peft: pip install 'omnidraft[lora]'; or leave out learn.lora_rank") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several adapters in one model are intended
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=name)
    activate(model, name)


def activate(model: Any, name: str) -> None:
    """Activate an adapter of the model. Cheap when it is active already."""
    if getattr(model, "active_omnidraft_adapter", None) == name:
        return
    for module in _adapted_modules(model).values():
        module.set_adapter(name)
    model.active_omnidraft_adapter = name


def is_adapter_weight(weight: str, name: str) -> bool:
    """Check whether a parameter's name is that of a weight of the adapter."""
    return f".{name}." in weight


def _adapted_modules(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_base_layer")}


def strip_adapters(model: Any) -> Any:
    """Return a copy of the model without its adapters, over the same weights."""
    fixed = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    bare = copy.deepcopy(model, fixed)
    for path, module in _adapted_modules(bare).items():
        parent, _, attribute = path.rpartition(".")
        setattr(bare.get_submodule(parent), attribute, module.get_base_layer())
    for attribute in ("peft_config", "active_omnidraft_adapter"):
        bare.__dict__.pop(attribute, None)
    return bare


def save_adapter(model: Any, name: str, folder: Path) -> None:
    """Write an adapter as peft does, so that `PeftModel.from_pretrained` loads it over the bare drafter."""
    folder.mkdir(parents=True)
    model.peft_config[name].save_pretrained(folder)
    weights = {weight: tensor for weight, tensor in model.named_parameters() if is_adapter_weight(weight, name)}
    save_file(
        {_peft_key(weight, name): tensor.detach().contiguous() for weight, tensor in weights.items()}, folder / _WEIGHTS
    )


def _peft_key(weight: str, name: str) -> str:
    return _PREFIX + weight.replace(f".{name}.", ".")


def read_adapter(model: Any, name: str, folder: Path) -> list[Tensor]:
    """Read the weights of a saved adapter, in the order of the model's parameters. Raises `ModelError` if the file
    cannot be read, or the adapter has another drafter's shape or another rank.
    """
    try:
        saved = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / _WEIGHTS} must hold the weights of an adapter, but: {error}") from error
    expected = {
        _peft_key(weight, name): tensor
        for weight, tensor in model.named_parameters()
        if is_adapter_weight(weight, name)
    }
    shapes = {key: tensor.shape for key, tensor in saved.items()}
    if shapes != {key: tensor.shape for key, tensor in expected.items()}:
        raise ModelError(
            f"the adapter in {folder} must have the shape of this drafter's (same layers, same rank); set "
            "learn.lora_rank as it was when the adapter was trained"
        )
    return [saved[key] for key in expected]


@torch.no_grad()
def load_adapter(model: Any, name: str, folder: Path) -> None:
    """Load a saved adapter into the injected one of that name. Raises as `read_adapter`."""
    weights = [weight for key, weight in model.named_parameters() if is_adapter_weight(key, name)]
    for weight, saved in zip(weights, read_adapter(model, name, folder), strict=True):
        weight.copy_(saved)


def is_adapter_folder(source: str) -> bool:
    """Check whether a name is a folder with a LoRA adapter and without the model itself."""
    folder = Path(source)
    return (folder / _CONFIG).is_file() and not (folder / "config.json").exists()


def read_base_model(source: str) -> str:
    """Return the name of the model to which the adapter of a folder belongs; a relative folder is relative to it."""
    path = Path(source) / _CONFIG
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} must be the configuration of an adapter, but cannot be read: {error}") from error
    if not base:
        raise ModelError(f"{path} must name its base model, but has no base_model_name_or_path; add it")
    relative = Path(source) / base
    return str(relative) if not Path(base).exists() and relative.exists() else str(base)


def merge_lora(model: Any, source: str) -> Any:
    """Merge the LoRA adapter of a folder into the weights of a model, and return the model."""
    try:
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise ModelError(f"{source!r} holds an adapter, which needs peft: pip install peft") from error
    kind = PeftConfig.from_pretrained(source).peft_type
    if kind != "LORA":
        raise ModelError(f"{source!r} must hold a LoRA adapter, but is of the kind {kind!s}; merge it into its model")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # keys that do not fit are reported below
            adapted = PeftModel.from_pretrained(model, source)
    except (RuntimeError, ValueError, SafetensorError) as error:  # the reason is in the last line
        raise ModelError(
            f"the adapter in {source!r} must fit its base model, but: {str(error).strip().splitlines()[-1].strip()}; "
            f"name the base model that it was trained on in {_CONFIG}"
        ) from error
    expected, saved = set(get_peft_model_state_dict(adapted)), set(_read_saved(Path(source)))
    if expected != saved:
        strays = sorted(expected ^ saved)
        raise ModelError(
            f"the adapter in {source!r} must fit its base model, but {len(strays)} tensors have no counterpart: "
            f"{', '.join(strays[:3])}; name the base model that it was trained on in {_CONFIG}"
        )
    merged = adapted.merge_and_unload()
    merged.__dict__.pop("peft_config", None)
    return merged


def _read_saved(folder: Path) -> dict[str, Tensor]:
    path = folder / _WEIGHTS
    if path.exists():
        return load_file(path)
    read: dict[str, Tensor] = torch.load(path.with_suffix(".bin"), map_location="cpu", weights_only=True)
    return read
