"""Numbers and aliases that MLflow gave to published versions: which one is the champion, and which the candidate."""

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from store.errors import OmnidraftError
from store.registry.registry import default_uri, list_versions

STORE = ("mlflow.db", "mlflow.db-wal")


class RegisteredNumbers:
    """The registered versions of the runs in a folder, from the MLflow store in it. Thread-safe.

    MLflow is imported by the first call, which takes seconds, and read again only after its store has changed.

    Args:
        runs: folder of runs.
    """

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._known: tuple[list[tuple[int, int]], list[dict[str, Any]]] | None = None

    def list_numbers(self, runs: Collection[str]) -> list[dict[str, Any]]:
        """Number and aliases of each registered version of the named runs; none without a store that can be read."""
        with self._lock:
            stamp = self._stamp()
            if not stamp:
                return []
            if self._known is None or self._known[0] != stamp:
                self._known = stamp, self._read()
            return [row for row in self._known[1] if row["run"] in runs]

    def _stamp(self) -> list[tuple[int, int]]:
        files = [self._runs / name for name in STORE]
        stats = [file.stat() for file in files if file.exists()]
        return [(stat.st_mtime_ns, stat.st_size) for stat in stats]

    def _read(self) -> list[dict[str, Any]]:
        try:
            found = list_versions(default_uri(self._runs))
        except (OmnidraftError, ImportError):  # the pages do without MLflow
            return []
        return [{name: getattr(one, name) for name in ("run", "version", "number", "aliases")} for one in found]
