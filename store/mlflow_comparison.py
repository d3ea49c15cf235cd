"""A comparison of two registered versions as a run of its own, beside the replays that made them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from store.mlflow_client import model_id_of, once
from store.mlflow_versions import IDENTITY, find_runs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


def write_comparison(
    client: "MlflowClient",
    identity: str,
    pair: Sequence["ModelVersion"],
    figures: Mapping[str, float],
    files: Sequence[Path],
) -> str:
    """The id of the run of that identity, made if it is not there and completed if it is not finished."""
    from mlflow.entities import LoggedModelInput, Metric, Param

    experiment = client.get_run(str(pair[1].run_id)).info.experiment_id
    name = f"v{pair[0].version} and v{pair[1].version}"
    run = once(
        lambda: find_runs(client, {"experiment_id": experiment}, identity),
        lambda: client.create_run(experiment, run_name=name, tags=_tags(identity, pair, figures)),
        lambda other: client.delete_run(other.info.run_id),
    )
    run_id = str(run.info.run_id)
    if run.info.status == "FINISHED":
        return run_id
    sides = dict(zip(("first", "second"), pair, strict=True))
    client.log_batch(run_id, params=[Param(side, version.version) for side, version in sides.items()])
    client.log_inputs(run_id, models=[LoggedModelInput(model_id_of(version)) for version in pair])
    made = run.info.start_time  # the same for every attempt
    client.log_batch(run_id, metrics=[Metric(key, value, made, 0) for key, value in sorted(figures.items())])
    for path in files:
        client.log_artifact(run_id, str(path))
    client.set_terminated(run_id)
    return run_id


def _tags(identity: str, pair: Sequence["ModelVersion"], figures: Mapping[str, float]) -> dict[str, str]:
    rows = "\n".join(f"| {key} | {value:.4g} |" for key, value in sorted(figures.items()))
    versions = "\n".join(f"- version {version.version}: {version.description}" for version in pair)
    note = f"Two versions of {pair[0].name} on the same prompts:\n\n{versions}\n\n| figure | value |\n|---|---|\n{rows}"
    return {
        IDENTITY: identity,
        "kind": "comparison",
        "mlflow.source.name": "omnidraft versions compare",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": note,
    }
