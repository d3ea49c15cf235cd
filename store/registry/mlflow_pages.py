"""Addresses of MLflow's own pages over the store: the table of runs, the curves, the versions, a comparison."""

import json
from typing import TYPE_CHECKING
from urllib.parse import quote

from store.errors import UsageError
from store.registry.mlflow_client import open_store, versions_of
from store.registry.mlflow_sync import EXPERIMENT
from store.registry.registered_version import RegisteredVersion, find_lineage
from store.registry.registry import list_versions

if TYPE_CHECKING:
    from mlflow import MlflowClient

_MODE = "workflowType=machine_learning"  # otherwise MLflow opens in another mode, which hides registered models
_VIEW = "omnidraft"  # key of the table's view
# The pages read a view from the tag of the experiment with its key, as their button "Share" writes it.
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"
_COLUMNS = (
    "params.`target`",
    "params.`drafter`",
    "metrics.`final/prompts`",
    "metrics.`final/tokens_per_second`",
    "metrics.`final/block_efficiency`",
    "metrics.`final/acceptance_rate`",
    "metrics.`probe/acceptance`",
    "metrics.`probe/tokens_per_second`",
)
_REPLAYS = "tags.kind = 'replay'"
_TABLE = {
    "searchFilter": _REPLAYS,
    "orderByKey": "attributes.start_time",
    "orderByAsc": False,
    "selectedColumns": _COLUMNS,
}


def list_pages(uri: str, name: str | None = None) -> dict[str, str]:
    """Return the addresses of pages by their titles, relative to the server's, and write the table's columns to MLflow.

    `name`: of a registered model; None for that of the newest version. Raises UsageError if there is no store, or
    nothing in it.
    """
    with open_store(uri) as client:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            raise UsageError(
                f"MLflow must know the experiment {EXPERIMENT!r}, but does not; `omnidraft replay` makes it"
            )
        experiment = str(found.experiment_id)
        client.set_experiment_tag(experiment, _VIEW_TAG, json.dumps(_TABLE))
        pages = {
            "runs": f"experiments/{experiment}/runs?viewStateShareKey={_VIEW}&{_MODE}",
            "curves": f"experiments/{experiment}/runs?compareRunsMode=CHART&searchFilter={quote(_REPLAYS)}&{_MODE}",
        }
        versions = list_versions(uri, name)
        newest = max(versions, key=lambda version: version.created_at, default=None)
        if newest is None:
            return pages
        pages["versions"] = f"models/{quote(newest.name)}?{_MODE}"
        mine = [version for version in versions if version.name == newest.name]
        runs = _find_pair(client, newest, mine)
        if len(runs) == 2:
            chosen = f"runs={quote(json.dumps(runs))}&experiments={quote(json.dumps([experiment]))}"
            pages["baseline and newest"] = f"compare-runs?{chosen}&{_MODE}"
    return pages


def _find_pair(client: "MlflowClient", newest: RegisteredVersion, versions: list[RegisteredVersion]) -> list[str]:
    """Return the ids of the MLflow runs of the first version of a version's lineage and of that version."""
    baseline = find_lineage(newest.number, versions)[-1]
    ids = {int(version.version): str(version.run_id) for version in versions_of(client, newest.name)}
    return [ids[number] for number in dict.fromkeys((baseline, newest.number))]
