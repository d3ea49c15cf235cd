"""The device that computes: its choice, its threads, and what clocks and reports need of it."""

import torch

from store.errors import ModelError


def pick_device(name: str) -> str:
    """Resolve the name of a device; `auto` is the first CUDA device if there is one, else the CPU."""
    chosen = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"the device {name!r} must be one that torch can use here: {reason}; try cpu") from error
    return chosen


def set_threads(number: int) -> None:
    """Set the number of CPU threads of one tensor operation."""
    torch.set_num_threads(number)


def synchronize(device: torch.device) -> None:
    """Wait until all submitted work of the device is done, so that a clock that is read next covers it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_threads() -> int:
    """Return the number of CPU threads of one tensor operation."""
    return torch.get_num_threads()


def device_name(device: torch.device) -> str | None:
    """Return the name of an accelerator; None for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
