"""The environment of a measurement in addition to the settings: machine, libraries, models."""

import os
import platform
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.assembly.models import Models


def load_average() -> float | None:
    """Return the mean number of runnable processes in the last minute; None if the system does not report it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def machine_of(models: "Models") -> dict[str, Any]:
    """Describe the environment of a measurement: machine, libraries, models."""
    from stages.engine.forward_pass.measurements import processor_name
    from stages.engine.models.devices import count_threads, device_name

    return {
        "device": device_name(models.target.device) or processor_name(),
        "cores": os.cpu_count(),
        "threads": count_threads(),
        "load": load_average(),
        "target_parameters": models.target.parameters,
        "drafter_parameters": models.drafter.parameters,
        "target_forward": models.target.forward_pass.name,
        "drafter_forward": models.drafter.forward_pass.name,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def peak_memory() -> int | None:
    """Return the peak memory of this process in bytes; None if the system does not report it."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
