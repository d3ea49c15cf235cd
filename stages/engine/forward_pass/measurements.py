"""Measurements of this machine, stored on disk: a run decides by them, so a repeated run must read the same values.

One JSON file per measurement, in the cache folder. Delete the folder to measure again.
"""

import hashlib
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


@cache
def digest_code() -> str:
    """Return a digest of the code that packs weights and computes with them."""
    code, own = hashlib.sha256(), Path(__file__).parent
    folders = (own, *map(own.with_name, ("compiled", "models", "quantisation")))
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


def digest_file(path: Path) -> str:
    """Return the sha256 of a file, or a digest of those of a folder's weights. A file is read once on this machine, as
    long as its size and time stay.
    """
    path = path.resolve()
    if path.is_dir():
        return digest_json("folder", [digest_file(one) for one in sorted(path.glob("*.safetensors"))])

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    state = path.stat()
    digest: str = Measurements().get_or_measure("file", [str(path), state.st_size, state.st_mtime_ns], compute)
    return digest


class Measurements:
    """Measurements of this machine, stored on disk. Those `recorded` in the run's checkpoint take precedence on every
    machine that resumes the run, and new ones are added to them. None: nothing is recorded.
    """

    def __init__(self, recorded: dict[str, Any] | None = None) -> None:
        self.recorded = recorded

    def get_or_measure(self, kind: str, key: list[Any], measure: Callable[[], Any]) -> Any:
        """Return the stored measurement of this key, machine and number of threads; measure it if there is none.

        Keys and measurements are JSON values.
        """
        measured = self.recall(kind, key)
        if measured is None:
            measured = measure()
            self.remember(kind, key, measured)
            if self.recorded is not None:
                self.recorded[_name_of(kind, key)] = measured
        return measured

    def recall(self, kind: str, key: list[Any]) -> Any:
        """Return what is stored for this key, machine and number of threads, or None. A run that resumes reads what it
        read when it began.
        """
        name = _name_of(kind, key)
        if self.recorded is not None and name in self.recorded:
            return self.recorded[name]
        found = None
        if path := _find_path(kind, key):
            with suppress(OSError, ValueError):
                found = json.loads(path.read_text(encoding="utf-8"))
        if self.recorded is not None:
            self.recorded[name] = found
        return found

    def remember(self, kind: str, key: list[Any], value: Any) -> None:
        """Store a value for later runs; what this run has read does not change."""
        if path := _find_path(kind, key):
            write_atomically(path, lambda file: file.write(json.dumps(value).encode()))


def _name_of(kind: str, key: list[Any]) -> str:
    return f"{kind}-{digest_json(kind, key)[:32]}"  # independent of the machine


def _find_path(kind: str, key: list[Any]) -> Path | None:
    here = processor_name(), os.cpu_count(), torch.get_num_threads(), torch.__version__
    return cache_path(kind, digest_json(kind, key, *here), "json")
