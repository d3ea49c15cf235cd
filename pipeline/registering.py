"""The run in MLflow: begun, or gone on with."""

from collections.abc import Sequence
from pathlib import Path

from pipeline import probe_prompts
from pipeline.config import Config
from pipeline.dealing import Dealing
from store.manifest import Manifest
from store.registry import MlflowRegistry, NoRegistry, Registry


def open_registry(
    config: Config, uri: str, manifest: Manifest, spool: Path, run: str, datasets: Sequence[tuple[str, str]]
) -> Registry:
    """Where versions and curves go; nowhere if nothing is to be published.

    Args:
        config: all settings.
        uri: of the MLflow store.
        manifest: of the log whose commits cover the messages.
        spool: the file in which messages wait.
        run: its name.
        datasets: name and source of each.
    """
    if not config.publish.enabled:
        return NoRegistry()
    registry = MlflowRegistry(uri, spool, model=config.publish.name, keep=manifest.messages)
    if manifest.messages:
        registry.resume()
    else:
        registry.start_run(run, _params(config), {}, datasets, identity=manifest.identity)
    return registry


def _params(config: Config) -> dict[str, object]:
    """The few settings by which runs are told apart in MLflow's pages."""
    return {
        "target": ", ".join(Dealing.of(config).targets),
        "drafter": config.drafter,
        "mode": config.draft.mode,
        "loss": config.learn.loss if config.learn.enabled else "none",
        "temperature": config.sampling.temperature,
        "max_draft": config.draft.max_draft,
        "stop_rule": config.draft.stop_rule if config.draft.adapt else "never",
        "batch": config.batch,
        "interval": config.learn.interval,
        "seed": config.seed,
        "probe": probe_prompts.identity() if config.publish.enabled and config.publish.probe else "none",
    }
