"""`omnidraft train`: a drafter from the logs of earlier runs."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.config.cli_options import (
    SETTINGS,
    NewRunsOption,
    PrintJsonOption,
    SetOption,
    flag,
    option,
    overrides_of,
    parse_settings,
)
from pipeline.config.environment import read_environment
from pipeline.config.settings import load
from pipeline.reports.terminal import print_table, status

if TYPE_CHECKING:
    from pipeline.training.offline_run import TrainingSummary

LOG = logging.getLogger("omnidraft.cli")

_FROM_LOG_HELP = "Folder of a run whose logged texts are learned; further runs may follow it."
_INTERVAL_HELP = "Texts of one update. [default: 16]"
_NEWEST_HELP = "Use the newest prompts of each run only, so many. Default: all."
_PASSES_HELP = "Most passes over the texts; a pass without a gain on the held-out texts is the last."


def train(
    from_log: Annotated[list[Path], typer.Option("--from-log", metavar="RUN", help=_FROM_LOG_HELP)],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Further runs.", show_default=False)
    ] = None,
    target: Annotated[str | None, option("targets", "Target model. Default: that of the first run.")] = None,
    drafter: Annotated[str | None, option("drafter", "Drafter to begin with. Default: as the first run began.")] = None,
    passes: Annotated[int, typer.Option(min=1, help=_PASSES_HELP)] = 8,
    newest: Annotated[int | None, typer.Option(min=1, help=_NEWEST_HELP)] = None,
    loss: Annotated[str | None, option("learn.loss")] = None,
    interval: Annotated[int | None, option("learn.interval", _INTERVAL_HELP, min=1)] = None,
    run: Annotated[Path | None, option("run", "Folder of the training; default: a new folder under --runs.")] = None,
    runs: NewRunsOption = Path("runs"),
    no_publish: Annotated[bool, flag("publish.enabled", False, "--no-publish", "No version and no MLflow.")] = False,
    mlflow_uri: Annotated[str | None, option("publish.mlflow_uri")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    device: Annotated[str | None, option("device")] = None,
    threads: Annotated[int | None, option("threads")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file that replaces the settings of the first run.", rich_help_panel=SETTINGS),
    ] = None,
    settings: SetOption = None,
    as_json: PrintJsonOption = False,
) -> None:
    """Train a drafter on the texts that earlier runs logged.

    The target reads every logged text once, so that the drafter learns its distributions along the text; then the
    drafter is trained in several passes. Some prompts are held out: an update that lowers the expected acceptance on
    them is dropped, and the best pass is published. Settings are those of the first run, unless others are given.
    """
    from pipeline.run.folder import open_new_run
    from pipeline.training.offline_run import LogTraining, make_training_config

    given = read_environment() | parse_settings(settings) | overrides_of(train, locals())
    logs = [*from_log, *(more or ())]
    made = make_training_config(logs, given, load(config) if config else None)
    run_folder, mirror = open_new_run(made.run, runs)
    with status("reading the logs and loading models") as show:
        training = LogTraining(made, logs, run_folder, newest=newest, mirror=mirror)
        summary = training.run(passes, show)
    if as_json:
        print(json.dumps({"run": mirror.name, **asdict(summary)}, indent=2))
    else:
        _print(summary)
    LOG.info("run: %s", mirror.name, extra={"run": mirror.name})
    if summary.version:
        LOG.info("use it with: omnidraft replay --drafter %s", run_folder / summary.version)
    if summary.stopped:
        raise typer.Exit(130)


def _print(summary: "TrainingSummary") -> None:
    rows = [
        ("texts", f"{summary.texts:,} with {summary.tokens:,} tokens, of which {summary.held_out:,} held out"),
        *((f"left out: {reason}", f"{number:,}") for reason, number in summary.left_out.items()),
        ("updates", f"{summary.updates:,}, of which the gate accepted {summary.served:,}"),
        ("expected acceptance as loaded", f"{summary.acceptance[0]:.3f}"),
        ("after each pass", ", ".join(f"{rate:.3f}" for rate in summary.acceptance[1:])),
        ("seconds", f"{summary.teacher_seconds:.1f} of the target, {summary.training_seconds:.1f} of training"),
        ("version", summary.version or "none"),
    ]
    print_table(("training", ""), rows)
