"""Measurements of this machine, stored on disk: a run decides by them, so a repeated run must read the same values.

One JSON file per measurement, in the cache folder. Delete the folder to measure again.
"""

import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stages.vocabulary.disk_cache import cache_path, digest_json, write_atomically


@cache
def processor_name() -> str:
    """Return the name of the processor, as far as the system reports one."""
    information = Path("/proc/cpuinfo")  # Linux; elsewhere Python knows
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Measurements:
    """Measurements of this machine, stored on disk.

    Args:
        recorded: measurements of the run so far, from its checkpoint. They take precedence on every machine that
            resumes the run, and new measurements are added. None: nothing is recorded.
    """

    def __init__(self, recorded: dict[str, Any] | None = None) -> None:
        self.recorded = recorded
        self._present: dict[str, Any] = {}  # of this process, where nothing is recorded

    def get_or_measure(self, kind: str, key: list[Any], measure: Callable[[], Any]) -> Any:
        """Return the stored measurement of this key, machine and number of threads; measure it if there is none.

        Keys and measurements are JSON values.
        """
        name = f"{kind}-{digest_json(kind, key)[:32]}"  # independent of the machine
        if self.recorded is not None and name in self.recorded:
            return self.recorded[name]
        here = processor_name(), os.cpu_count(), torch.get_num_threads(), torch.__version__
        path = cache_path(kind, digest_json(kind, key, *here), "json")
        measured = None
        if path:
            with suppress(OSError, ValueError):
                measured = json.loads(path.read_text(encoding="utf-8"))
        if measured is None:
            measured = measure()
            if path:
                write_atomically(path, lambda file: file.write(json.dumps(measured).encode()))
        if self.recorded is not None:
            self.recorded[name] = measured
        return measured

    def measure_once(self, kind: str, key: list[Any], measure: Callable[[], Any]) -> Any:
        """Return the recorded measurement of the run; measure at its first call, and do not look at earlier runs.

        For what depends on the present load of the machine. The arguments are those of `get_or_measure`.
        """
        name = f"{kind}-{digest_json(kind, key)[:32]}"
        recorded = self._present if self.recorded is None else self.recorded
        if name not in recorded:
            recorded[name] = measure()
        return recorded[name]
