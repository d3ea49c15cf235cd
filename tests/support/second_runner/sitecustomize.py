"""Lets vLLM's second model runner run on a processor where Triton has no backend for it: in Triton's interpreter.

Python imports it at its start, where its folder is on the path.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton import backends
from triton.backends.compiler import GPUTarget


class InterpretedDriver:
    """What vLLM and Triton ask of a backend's driver."""

    @staticmethod
    def is_active() -> bool:
        """Return that there is no other."""
        return True

    def get_current_target(self) -> GPUTarget:
        """Return the name by which vLLM recognises a backend for processors."""
        return GPUTarget("cpu", 0, 0)

    def get_current_device(self) -> int:
        """Return the number of the only device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the number of the only stream."""
        return device

    def get_active_torch_device(self) -> torch.device:
        """Return torch's name of the device."""
        return torch.device("cpu")

    def get_device_interface(self) -> object:
        """Return torch's functions for the device."""
        return torch.cpu


backends.backends.clear()
backends.backends["cpu"] = backends.Backend(compiler=None, driver=InterpretedDriver)
