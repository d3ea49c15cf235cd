"""Synchronisation and names of the device that computes, for clocks and reports."""

import torch


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
