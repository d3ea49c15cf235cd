"""The table of runs: when each began, on what, how far it came, and what it reached."""

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dashboards.web.logs import Logs, RunState
from dashboards.web.queries.story import read_check
from dashboards.web.queries.tables import read_datasets, read_totals, rows
from store.errors import OmnidraftError
from store.query.log_reader import LogReader

SETTINGS = "config.json"  # in the folder of a run
_EVENTS = """
    SELECT (SELECT count(*) FROM drifts WHERE action IN ('reset', 'recall')) AS drifts,
        (SELECT count(*) FROM versions) AS versions
"""
_NOTHING: dict[str, Any] = {"targets": [], "datasets": []}


class Overview:
    """Rows of the table of runs; a run is read again only after it has committed more. Thread-safe."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, dict[str, Any]]] = {}  # by the name of the run: stamp, totals

    def list_runs(self) -> list[dict[str, Any]]:
        """One row per run, the newest commit first: its state, and the totals of its log."""
        with self._lock:
            states = self._logs.states()
            folders = self._logs.folders() if states else {}
            return [self._describe(folders[state.name], state) for state in states if state.name in folders]

    def _describe(self, folder: Path, state: RunState) -> dict[str, Any]:
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
            return row | self._read_totals(folder) | {"check": read_check(folder)}
        except OmnidraftError as error:
            return row | _NOTHING | {"problem": str(error)}

    def _read_totals(self, folder: Path) -> dict[str, Any]:
        stamp = self._logs.stamp([folder.name])
        known = self._known.get(folder.name)
        if known is None or known[0] != stamp:
            with LogReader([folder]) as log:
                datasets = [row["dataset"] for row in read_datasets(log)]
                totals, (events,) = next(iter(read_totals(log)), _NOTHING), rows(log.select(_EVENTS))
            known = self._known[folder.name] = stamp, {**totals, **events, "datasets": datasets}
        return known[1]


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
