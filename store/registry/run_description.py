"""What MLflow shows of a run beyond its log and its versions: a file in the run's folder, written when it begins."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from store.errors import CorruptError
from store.files import json_bytes, write_whole

FILE = "mlflow.json"
# Of a run, the first columns of the table and the first rows of a comparison, which MLflow sorts.
RESULTS = ("tokens_per_second", "times_without_drafts", "acceptance_rate", "drifts")


@dataclass(frozen=True)
class RunDescription:
    """The description of a run."""

    name: str
    identity: str  # by which the run is found in MLflow; no other run has it
    began: int  # milliseconds since 1970
    params: Mapping[str, str]  # few: MLflow's pages show all of them
    datasets: Sequence[tuple[str, str]]  # name and source of each
    targets: Sequence[str]
    uri: str | None  # of the MLflow store; None for the one next to the run's folder

    @classmethod
    def create(
        cls,
        name: str,
        params: Mapping[str, object],
        datasets: Sequence[tuple[str, str]],
        targets: Sequence[str],
        uri: str | None,
    ) -> Self:
        texts = {key: str(value) for key, value in params.items()}
        return cls(name, uuid4().hex, time.time_ns() // 1_000_000, texts, tuple(datasets), tuple(targets), uri)

    @classmethod
    def read(cls, run_folder: Path) -> Self | None:
        """Read the description of a run; None of a run that is not published. Raises CorruptError."""
        path = run_folder / FILE
        try:
            found = json.loads(path.read_bytes())
            return cls(**{**found, "datasets": [(name, source) for name, source in found["datasets"]]})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CorruptError(
                f"{path} must describe the run for MLflow, but cannot be read: {error}; restore it from a copy"
            ) from error

    def write(self, run_folder: Path) -> None:
        write_whole(run_folder / FILE, json_bytes(asdict(self)))


def numbers_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a run by their names in MLflow: `RESULTS`, which are read first, the others of the
    totals and of the ledger after `whole/`.
    """
    totals = summary.get("totals", summary)
    found = {**totals, **totals.get("ledger", {})}
    if "drifts" in totals:
        found["drifts"] = sum(drift["action"] in ("reset", "recall") for drift in totals["drifts"])
    return {
        key if key in RESULTS else f"whole/{key}": float(value)
        for key, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
