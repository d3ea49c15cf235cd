"""All names in MLflow after a small run and a resumed one, from experiments to files."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from product import connect, read_manifest


def artifacts(client: Any, run: str, folder: str | None = None) -> Iterator[str]:
    """Files of a run in MLflow."""
    for one in client.list_artifacts(run, folder):
        if one.is_dir:
            yield from artifacts(client, run, one.path)
        else:
            yield re.sub(r"\d{6}", "<number>", one.path)


def names(keys: Any) -> list[str]:
    """The distinct keys, sorted and without those that MLflow adds."""
    return sorted({key for key in keys if not key.startswith("mlflow.")})


def find_in(client: Any) -> dict[str, Any]:
    """All names in a store."""
    experiments = [one for one in client.search_experiments() if one.name != "Default"]
    ids = [one.experiment_id for one in experiments]
    runs = client.search_runs(ids)
    models = client.search_registered_models()
    versions = client.search_model_versions()
    logged = client.search_logged_models(ids)
    aliases = {alias for one in models for alias in client.get_registered_model(one.name).aliases}
    return {
        "experiments": sorted(one.name for one in experiments),
        "experiment tags": names(key for one in experiments for key in one.tags),
        "runs": sorted({re.sub(r"\d+", "<number>", str(one.info.run_name)) for one in runs}),
        "statuses": sorted({one.info.status for one in runs}),
        "parameters": names(key for one in runs for key in one.data.params),
        "metrics": names(key for one in runs for key in one.data.metrics),
        "run tags": names(key for one in runs for key in one.data.tags),
        "dataset inputs": sorted({one.dataset.name for run in runs for one in run.inputs.dataset_inputs}),
        "artifacts": sorted({name for one in runs for name in artifacts(client, one.info.run_id)}),
        "registered models": sorted(one.name for one in models),
        "model tags": names(key for one in models for key in one.tags),
        "aliases": sorted(aliases),
        "version tags": names(key for one in versions for key in one.tags),
        "logged models": sorted({re.sub(r"\d+", "<number>", one.name) for one in logged}),
        "logged model tags": names(key for one in logged for key in one.tags),
        "logged model parameters": names(key for one in logged for key in one.params),
        "logged model metrics": names(metric.key for one in logged for metric in one.metrics or []),
    }


@pytest.mark.slow
def test_names_in_mlflow(golden: Callable[[str, Any], None], small_run: Path, resumed: Path) -> None:
    """Both runs write to one store."""
    assert read_manifest(resumed).finished
    golden("mlflow", find_in(connect(f"sqlite:///{small_run.parent}/mlflow.db")))
