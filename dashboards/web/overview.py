"""The table of runs: when each began, on what, how far it came, and what it reached."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from dashboards.web.logs import Logs, RunState
from dashboards.web.queries.story import read_check
from dashboards.web.queries.tables import read_datasets, read_totals, rows
from store.errors import OmnidraftError
from store.query.findings import read_findings
from store.query.log_reader import LogReader

SETTINGS = "config.json"  # in the folder of a run
_EVENTS = """
    SELECT (SELECT count(*) FROM drifts WHERE action IN ('reset', 'recall')) AS drifts,
        (SELECT count(*) FROM versions) AS versions
"""
_NOTHING: dict[str, Any] = {"targets": [], "datasets": []}
_LOCK = Lock()


def list_runs(logs: Logs) -> list[dict[str, Any]]:
    """One row per run, the newest commit first: its state, and the totals of its log. Thread-safe."""
    with _LOCK:
        states = logs.states()
        folders = logs.folders() if states else {}
        return [_describe(logs, folders[state.name], state) for state in states if state.name in folders]


def _describe(logs: Logs, folder: Path, state: RunState) -> dict[str, Any]:
    row = {
        "run": state.name,
        "started": _find_start(folder),
        "state": state.activity,
        "learning": _learns(folder),
        "prompts": state.prompts,
        "problem": state.problem,
    }
    if state.problem:
        return row | _NOTHING
    try:
        return row | _read_totals(folder, logs.stamp([folder.name])) | {"check": read_check(folder)}
    except OmnidraftError as error:
        return row | _NOTHING | {"problem": str(error)}


@lru_cache(maxsize=4096)
def _read_totals(folder: Path, stamp: str) -> dict[str, Any]:
    """Read a run as it is committed at a `stamp`."""
    with LogReader([folder]) as log:
        datasets = [row["dataset"] for row in read_datasets(log)]
        totals, (events,) = next(iter(read_totals(log)), _NOTHING), rows(log.select(_EVENTS))
        times = next((found.times for found in read_findings(log).values()), None)
    return {**totals, **events, "datasets": datasets, "times": times and asdict(times)}


def _learns(folder: Path) -> bool | None:
    """Whether a run trained the drafter and the head; None if it has no readable settings."""
    try:
        return bool(json.loads((folder / SETTINGS).read_bytes())["learn"]["enabled"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _find_start(folder: Path) -> float | None:
    """When a run began, in seconds since 1970: by its name, or else when its process wrote the settings."""
    try:
        return datetime.strptime(folder.name, "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        settings = folder / SETTINGS
        return settings.stat().st_mtime if settings.exists() else None
