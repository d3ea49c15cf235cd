"""Addresses of MLflow's own pages over the store: the table of runs, the curves, the versions."""

import json
from urllib.parse import quote

from store.errors import UsageError
from store.registry.mlflow_client import open_store
from store.registry.mlflow_sync import EXPERIMENT
from store.registry.run_description import RESULTS

_MODE = "workflowType=machine_learning"  # otherwise MLflow opens in another mode, which hides registered models
_VIEW = "omnidraft"  # key of the table's view
# The pages read a view from the tag of the experiment with its key, as their button "Share" writes it.
_VIEW_TAG = f"mlflow.sharedViewState.{_VIEW}"
_COLUMNS = (
    *(f"metrics.`{name}`" for name in (*RESULTS, "version")),
    "params.`target`",
    "params.`drafter`",
)
_REPLAYS = "tags.kind = 'replay'"
_TABLE = {
    "searchFilter": _REPLAYS,
    "orderByKey": "attributes.start_time",
    "orderByAsc": False,
    "selectedColumns": _COLUMNS,
}


def list_pages(uri: str) -> dict[str, str]:
    """Return the addresses of pages by their titles, relative to the server's, and write the table's columns to MLflow.

    Raises UsageError if there is no store, or nothing in it.
    """
    with open_store(uri) as client:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            raise UsageError(
                f"MLflow must know the experiment {EXPERIMENT!r}, but does not; `omnidraft replay` makes it"
            )
        experiment = str(found.experiment_id)
        client.set_experiment_tag(experiment, _VIEW_TAG, json.dumps(_TABLE))
    replays = f"experiments/{experiment}/runs"
    return {
        "runs": f"{replays}?viewStateShareKey={_VIEW}&{_MODE}",
        "curves": f"{replays}?compareRunsMode=CHART&searchFilter={quote(_REPLAYS)}&{_MODE}",
        "versions": f"models?{_MODE}",
    }
