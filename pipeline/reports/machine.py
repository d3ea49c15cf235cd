"""The environment of a measurement in addition to the settings: machine, libraries, models."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.assembly.models import Models


def find_own_version() -> str:
    """Return the version of omnidraft; `unknown` where it runs from its source tree without being installed."""
    try:
        return version("omnidraft")
    except PackageNotFoundError:
        return "unknown"


def machine_of(models: "Models") -> dict[str, Any]:
    """Describe the environment of a measurement: machine, libraries, models."""
    from stages.engine.forward_pass.measurements import processor_name
    from stages.engine.models.devices import count_threads, device_name

    return {
        "device": device_name(models.target.device) or processor_name(),
        "cores": os.cpu_count(),
        "threads": count_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "target_parameters": models.target.parameters,
        "drafter_parameters": models.drafter.parameters,
        "target_forward": models.target.forward_pass.name,
        "drafter_forward": models.drafter.forward_pass.name,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
