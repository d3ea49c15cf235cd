"""Comparisons of two versions on the same prompts, as `omnidraft versions compare` wrote them to MLflow."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from store.registry.mlflow_client import fetch_pages, open_store

_DESCRIBED = re.compile("Two versions of (.+) on the same prompts:")  # as `record_comparison` writes it
_FINISHED = "tags.kind = 'comparison' and attributes.status = 'FINISHED'"


@dataclass(frozen=True, slots=True)
class RecordedComparison:
    """A comparison in MLflow.

    Attributes:
        name: of the registered model.
        first, second: numbers of both versions in the registry.
        made_at: seconds since 1970.
        metrics: by name, such as `acceptance_rate/change`, and `prompts`.
    """

    name: str
    first: int
    second: int
    made_at: float
    metrics: Mapping[str, float]


def list_comparisons(uri: str) -> list[RecordedComparison]:
    """Return all comparisons of registered versions, the newest first. Raises UsageError without a store."""
    with open_store(uri) as client:
        experiments = fetch_pages(lambda page: client.search_experiments(page_token=page))
        ids, by = [one.experiment_id for one in experiments], ["attributes.start_time DESC"]
        runs = fetch_pages(lambda page: client.search_runs(ids, _FINISHED, order_by=by, page_token=page))
    return [
        RecordedComparison(
            described[1],
            int(run.data.params["first"]),
            int(run.data.params["second"]),
            run.info.start_time / 1000,
            dict(run.data.metrics),
        )
        for run in runs
        if (described := _DESCRIBED.match(run.data.tags.get("mlflow.note.content", "")))
    ]
