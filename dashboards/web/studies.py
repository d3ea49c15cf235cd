"""The studies of a folder of runs: tables and figures of the paper, which `omnidraft study-paper` measured."""

import json
from pathlib import Path
from typing import Any

FILES = "*/*-panels.json"
MOST = 40  # studies that are shown, the newest
LARGEST = 4_000_000  # bytes of a file that is read
_TEXTS = ("title", "remark", "command", "date")


def list_studies(runs: Path) -> list[dict[str, Any]]:
    """List the studies of a folder of runs, by their titles; files that cannot be read are left out.

    Returns:
        one mapping each with `file` (relative to the folder), `title`, `remark`, `command`, `date`, `measured` and
        `panels` (`pipeline/study/paper/panels.py`).
    """
    files = sorted(runs.glob(FILES), key=lambda file: file.stat().st_mtime, reverse=True)[:MOST]
    found = [study for file in files if (study := _read(file, runs)) is not None]
    return sorted(found, key=lambda study: (study["title"], study["file"]))


def _read(file: Path, runs: Path) -> dict[str, Any] | None:
    try:
        if file.stat().st_size > LARGEST:
            return None
        content = json.loads(file.read_bytes())
        texts = {name: str(content[name]) for name in _TEXTS}
        return {
            "file": str(file.relative_to(runs)),
            **texts,
            "measured": [str(one) for one in content.get("measured", ())],
            "panels": [_check_panel(one) for one in content["panels"]],
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_panel(panel: dict[str, Any]) -> dict[str, Any]:
    """Return a panel if every series has a value for each point or category.

    Raises:
        ValueError: one has not.
    """
    for series in panel["series"]:
        if len(series["values"]) != len(panel["categories"] or series["at"]):
            raise ValueError(f"the series {series['name']} must have a value for each of its points")
    return panel
