"""The run in MLflow: begun, or gone on with; what it is told of the settings and of the summary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import probe_prompts
from pipeline.config import Config
from pipeline.dealing import Dealing
from store.manifest import Manifest
from store.registry import MlflowRegistry, NoRegistry, Registry
from store.versions import metric_name


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


def numbers_of(summary: dict[str, Any]) -> dict[str, float]:
    """The totals, the ledger and the last fifth of each dataset, flat."""
    totals, ledger = summary["totals"], summary["totals"]["ledger"]
    numbers = totals | {f"ledger/{key}": value for key, value in ledger.items()}
    found = {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}
    for dataset, figures in summary["datasets"].items():
        for part in ("first_fifth", "last_fifth"):
            rate = figures[part]["acceptance_rate"]
            if rate is not None:
                found[f"{metric_name(dataset)}/{part}_acceptance_rate"] = rate
    return found
