"""What MLflow knows of published versions: numbers, aliases such as *champion*, and comparisons of two versions."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from store.errors import OmnidraftError
from store.registry.mlflow_comparisons import RecordedComparison, list_comparisons
from store.registry.registered_version import RegisteredVersion
from store.registry.registry import default_uri, list_versions

STORE = ("mlflow.db", "mlflow.db-wal")
METRICS = ("acceptance_rate", "block_efficiency", "tokens_per_second")  # of a comparison
_PARTS = ("first", "second", "change", "low", "high")
_NOTHING: dict[str, list[dict[str, Any]]] = {"versions": [], "comparisons": []}
_LOCK = Lock()


def list_numbers(folder: Path, runs: Collection[str]) -> list[dict[str, Any]]:
    """Registered model, number and aliases of each version of the named runs in a folder; none without a store that can
    be read.
    """
    return [row for row in _find(folder)["versions"] if row["run"] in runs]


def list_compared(folder: Path, runs: Collection[str]) -> list[dict[str, Any]]:
    """Comparisons with a version of the named runs, the newest first; none without a store that can be read.

    Each has the `prompts`, both versions as `first` and `second` (`number`, `run` and `version`), and for each of
    `METRICS` the values of both, the `change` and its interval. The change of the tokens per second is a ratio.
    """
    found = _find(folder)["comparisons"]
    return [row for row in found if row["first"]["run"] in runs or row["second"]["run"] in runs]


def _find(folder: Path) -> dict[str, list[dict[str, Any]]]:
    stats = [file.stat() for file in (folder / name for name in STORE) if file.exists()]
    with _LOCK:
        return _read(folder, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)) if stats else _NOTHING


@lru_cache(maxsize=1)
def _read(folder: Path, state: tuple[tuple[int, int], ...]) -> dict[str, list[dict[str, Any]]]:
    """Read the store in a `state` of its files. The first call imports MLflow, which takes seconds."""
    uri = default_uri(folder)
    try:
        versions, comparisons = list_versions(uri), list_comparisons(uri)
    except (OmnidraftError, ImportError):  # the pages do without MLflow
        return _NOTHING
    kept = ("name", "run", "version", "number", "aliases")
    return {
        "versions": [{name: getattr(one, name) for name in kept} for one in versions],
        "comparisons": [_describe(one, versions) for one in comparisons],
    }


def _describe(comparison: RecordedComparison, versions: Sequence[RegisteredVersion]) -> dict[str, Any]:
    """The row of a comparison. Values that were not measured are None."""
    known = {one.number: one for one in versions if one.name == comparison.name}
    sides = {}
    for side, number in (("first", comparison.first), ("second", comparison.second)):
        one = known.get(number)
        sides[side] = {"number": number, "run": one and one.run, "version": one and one.version}
    metrics = {metric: {part: comparison.metrics.get(f"{metric}/{part}") for part in _PARTS} for metric in METRICS}
    prompts = comparison.metrics.get("prompts")
    return {"made_at": comparison.made_at, "prompts": prompts and int(prompts), **sides, **metrics}
