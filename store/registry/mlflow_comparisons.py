"""Comparisons of two versions on the same prompts, each an MLflow run of its own, on the same level as replays."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from store.files import digest_of
from store.registry.mlflow_client import (
    IDENTITY,
    fetch_pages,
    find_or_create,
    find_runs,
    model_id_of,
    open_store,
    resolve,
)
from store.registry.registered_version import Reference

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_FINISHED = "tags.kind = 'comparison' and attributes.status = 'FINISHED'"


@dataclass(frozen=True, slots=True)
class RecordedComparison:
    """A comparison in MLflow."""

    name: str  # of the registered model
    first: int  # number in the registry, as the next
    second: int
    made_at: float  # seconds since 1970
    metrics: Mapping[str, float]  # by name, such as `acceptance_rate/change`, and `prompts`


def record_comparison(
    uri: str,
    name: str,
    first: int,
    second: int,
    metrics: Mapping[str, float],
    files: Sequence[Path],
    span: tuple[float, float],
) -> str:
    """Write a comparison of two versions to MLflow; return the run's id. `span`: its seconds since 1970.

    A comparison with the same versions, metrics and contents of files is one run, however often it is written. Raises
    ModelError for a version that does not exist, UsageError without a store.
    """
    from mlflow.entities import LoggedModelInput, Metric, Param

    content = [name, first, second, sorted(metrics.items()), [(path.name, digest_of(path)) for path in files]]
    identity = f"comparison-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]}"
    began, ended = (round(1000 * seconds) for seconds in span)
    with open_store(uri) as client:
        pair = [resolve(client, Reference(name, number)) for number in (first, second)]
        experiment = client.get_run(str(pair[1].run_id)).info.experiment_id
        tags = _tags(identity, pair)
        run = find_or_create(
            lambda: find_runs(client, experiment, identity),
            lambda: client.create_run(experiment, began, tags, f"#{first} and #{second}"),
            lambda other: client.delete_run(other.info.run_id),
        )
        run_id = str(run.info.run_id)
        if run.info.status != "FINISHED":
            points = [Metric(key, value, began, 0) for key, value in sorted(metrics.items())]
            params = {"model": name, "first": first, "second": second}
            client.log_batch(run_id, metrics=points, params=[Param(key, str(value)) for key, value in params.items()])
            client.log_inputs(run_id, models=[LoggedModelInput(model_id_of(version)) for version in pair])
            for path in files:
                client.log_artifact(run_id, str(path))
            client.set_terminated(run_id, end_time=ended)
    return run_id


def list_comparisons(uri: str) -> list[RecordedComparison]:
    """Return all comparisons of registered versions, the newest first. Raises UsageError without a store."""
    with open_store(uri) as client:
        experiments = fetch_pages(lambda page: client.search_experiments(page_token=page))
        ids, by = [one.experiment_id for one in experiments], ["attributes.start_time DESC"]
        runs = fetch_pages(lambda page: client.search_runs(ids, _FINISHED, order_by=by, page_token=page))
    return [
        RecordedComparison(
            params["model"],
            int(params["first"]),
            int(params["second"]),
            run.info.start_time / 1000,
            dict(run.data.metrics),
        )
        for run in runs
        if "model" in (params := run.data.params)
    ]


def _tags(identity: str, pair: Sequence["ModelVersion"]) -> dict[str, str]:
    versions = "\n".join(f"- version {version.version}: {version.description}" for version in pair)
    note = f"Two versions of {pair[0].name} on the same prompts:\n\n{versions}"
    return {
        IDENTITY: identity,
        "kind": "comparison",
        "mlflow.source.name": "omnidraft versions compare",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": note,
    }
