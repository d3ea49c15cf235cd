"""Comparisons of two versions on the same prompts, as `omnidraft versions compare` wrote them to MLflow."""

from collections.abc import Mapping
from dataclasses import dataclass

from store.registry.mlflow_client import fetch_pages, open_store
from store.registry.registry import MODEL

_FINISHED = "tags.kind = 'comparison' and attributes.status = 'FINISHED'"


@dataclass(frozen=True, slots=True)
class RecordedComparison:
    """A comparison in MLflow.

    Attributes:
        first, second: numbers of both versions in the registry.
        made_at: seconds since 1970.
        metrics: by name, such as `acceptance_rate/change`, and `prompts`.
    """

    first: int
    second: int
    made_at: float
    metrics: Mapping[str, float]


def list_comparisons(uri: str, name: str = MODEL) -> list[RecordedComparison]:
    """Return all comparisons of versions of a registered model, the newest first. Raises UsageError without a store."""
    with open_store(uri) as client:
        experiments = fetch_pages(lambda page: client.search_experiments(page_token=page))
        ids, by = [one.experiment_id for one in experiments], ["attributes.start_time DESC"]
        runs = fetch_pages(lambda page: client.search_runs(ids, _FINISHED, order_by=by, page_token=page))
    return [
        RecordedComparison(
            int(run.data.params["first"]),
            int(run.data.params["second"]),
            run.info.start_time / 1000,
            dict(run.data.metrics),
        )
        for run in runs
        if run.data.tags.get("mlflow.note.content", "").startswith(f"Two versions of {name} ")
    ]
