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


def remembered(kind: str, key: list[Any], measure: Callable[[], Any]) -> Any:
    """What was measured under this key on this machine, with this number of threads; measured now if it was not yet.

    Args:
        kind: what is measured.
        key: JSON values that it depends on.
        measure: gives a JSON value.
    """
    root = folder()
    digest = digest_of(kind, key, processor(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    path = root / f"{kind}-{digest[:32]}.json" if root else None
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
