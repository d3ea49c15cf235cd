"""What MLflow shows of a run beyond its log and its versions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.config.settings import Config
from pipeline.learning import probe_prompts
from pipeline.run.folder import mlflow_of
from store.errors import RunError
from store.log.lock import is_being_written
from store.log.manifest import Manifest
from store.registry.mlflow_client import explain_failures
from store.registry.mlflow_sync import RunSync, Sent
from store.registry.run_description import RunDescription

UNSENT_TIMEOUT = 60.0  # seconds that a finished run waits for MLflow


def describe_run(
    config: Config, run_folder: Path, datasets: Sequence[tuple[str, str]], log: Manifest
) -> RunDescription:
    """Write the description of a run that begins, or read that of a run that resumes, perhaps with another store.

    `datasets`: name and source of each; `log`: what the process that publishes has committed.
    """
    begun = log.checkpoint is not None or log.finished
    found = RunDescription.read(run_folder) if begun else None
    uri, targets = config.publish.mlflow_uri, config.router.targets
    if found:
        wanted = replace(found, uri=uri)
    else:
        params = {  # the few settings that distinguish runs in MLflow's pages
            "target": ", ".join(targets),
            "drafter": config.drafter,
            "mode": config.draft.mode,
            "loss": config.learn.loss if config.learn.enabled else "none",
            "temperature": config.sampling.temperature,
            "max_draft": config.draft.max_draft,
            "stop": config.draft.stop,
            "batch": config.batch,
            "interval": config.learn.interval,
            "seed": config.seed,
            "probe": probe_prompts.identity() if config.publish.enabled else "none",
        }
        wanted = RunDescription.create(run_folder.resolve().name, params, datasets, targets, uri)
    if wanted != found:
        wanted.write(run_folder)
    return wanted


def sync_run(run_folder: Path, name: str, uri: str | None) -> Sent:
    """Send what MLflow lacks of a run, named `name` on a command line; without a `uri` to the store that it was
    published to.
    """
    description = RunDescription.read(run_folder)
    if description is None:
        raise RunError(f"{name} must hold a run that publishes versions, but was begun without; see --publish")
    uri = uri or description.uri or mlflow_of(name)
    with explain_failures(uri):
        return RunSync(run_folder.resolve(), uri).update(stopped=not is_being_written(run_folder))
