"""What was measured on this machine, kept on disk: a run decides by it, so the same run again should find the same.

One JSON file per measurement, beside the other cached files. Delete the folder to measure anew.
"""

import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from stages.vocabulary_cache import digest_of, folder


@cache
def processor() -> str:
    """What the processor calls itself, as far as the system tells."""
    information = Path("/proc/cpuinfo")  # Linux; elsewhere Python knows
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


_notebook: dict[str, Any] | None = None


def note_in(notebook: dict[str, Any] | None) -> None:
    """From now on this process notes what was measured here too, and believes what is noted before anything else;
    None: it does no longer.

    A run keeps its notebook in its checkpoints, so that it goes on by the same figures wherever it goes on.
    """
    global _notebook
    _notebook = notebook


def remembered(kind: str, key: list[Any], measure: Callable[[], Any]) -> Any:
    """What was measured under this key on this machine, with this number of threads; measured now if it was not yet.

    Args:
        kind: what is measured.
        key: JSON values that it depends on.
        measure: gives a JSON value.
    """
    root = folder()
    digest = digest_of(kind, key, processor(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    noted = f"{kind}-{digest_of(kind, key)[:32]}"  # on whatever machine
    if _notebook is not None and noted in _notebook:
        return _notebook[noted]
    found = _found(root / f"{kind}-{digest[:32]}.json" if root else None, measure)
    if _notebook is not None:
        _notebook[noted] = found
    return found


def _found(path: Path | None, measure: Callable[[], Any]) -> Any:
    """What is on disk, or else measured now and put there."""
    if path:
        with suppress(OSError, ValueError):
            return json.loads(path.read_text(encoding="utf-8"))
    found = measure()
    if path:
        part = path.with_name(f".{path.name}.{uuid4().hex}")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(found), encoding="utf-8")
            os.replace(part, path)
    return found
