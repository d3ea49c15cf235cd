"""`omnidraft replay`: the main job."""

import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli_options import option, parsed
from pipeline.config import Config, load
from store.errors import ConfigError, RunError

# The command's options and the settings that they override.
_OPTIONS = {
    "drafter": "drafter",
    "batch": "batch",
    "seed": "seed",
    "device": "device",
    "dtype": "dtype",
    "threads": "threads",
    "prompt_field": "source.prompt_field",
    "template": "source.template",
    "limit": "source.limit",
    "mode": "draft.mode",
    "max_draft": "draft.max_draft",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "max_new_tokens": "sampling.max_new_tokens",
    "loss": "learn.loss",
    "interval": "learn.interval",
    "mlflow_uri": "publish.mlflow_uri",
    "run": "run",
}
_LISTS = {"sources": "sources", "target": "targets", "swap": "swaps", "where": "source.where"}
_FLAGS = {
    "no_learn": ("learn.enabled", False),
    "no_adapt": ("draft.adapt", False),
    "no_publish": ("publish.enabled", False),
    "lora": ("learn.lora", True),
    "chat": ("source.chat", True),
}


class OnOff(StrEnum):
    """Whether."""

    ON = "on"
    OFF = "off"


_LOG_TEXT_HELP = "Whether the log keeps prompts, texts and tokens' bytes; ids are kept in any case."
_RESUME_HELP = "Go on with the unfinished run in this folder, from its last commit and with its settings."
_Resumed = Annotated[Path | None, typer.Option(metavar="DIR", help=_RESUME_HELP, show_default=False)]
_SET_HELP = "Any other setting, such as learn.rate=0.002; may be repeated."
_Settings = Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP, metavar="KEY=VALUE")]


def replay(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Parquet, JSONL or CSV files, - for JSONL on standard input, hf://owner/dataset[/config]:split, "
            "builtin:docs, builtin:code. [default: builtin:docs builtin:code]",
            show_default=False,
        ),
    ] = None,
    target: Annotated[list[str] | None, option("targets")] = None,
    drafter: Annotated[str | None, option("drafter")] = None,
    swap: Annotated[list[str] | None, option("swaps")] = None,
    run: Annotated[Path | None, option("run")] = None,
    resume: _Resumed = None,
    mode: Annotated[str | None, option("draft.mode")] = None,
    temperature: Annotated[float | None, option("sampling.temperature")] = None,
    top_p: Annotated[float | None, option("sampling.top_p")] = None,
    top_k: Annotated[int | None, option("sampling.top_k")] = None,
    max_new_tokens: Annotated[int | None, option("sampling.max_new_tokens")] = None,
    max_draft: Annotated[int | None, option("draft.max_draft")] = None,
    batch: Annotated[int | None, option("batch")] = None,
    loss: Annotated[str | None, option("learn.loss")] = None,
    interval: Annotated[int | None, option("learn.interval")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="One adapter per target over one frozen drafter.")] = False,
    no_learn: Annotated[bool, typer.Option("--no-learn", help="Freeze the drafter and the head.")] = False,
    no_adapt: Annotated[bool, typer.Option("--no-adapt", help="Always draft --max-draft pieces.")] = False,
    no_publish: Annotated[bool, typer.Option("--no-publish", help="No versions and no MLflow.")] = False,
    seed: Annotated[int | None, option("seed")] = None,
    device: Annotated[str | None, option("device")] = None,
    dtype: Annotated[str | None, option("dtype")] = None,
    threads: Annotated[int | None, option("threads")] = None,
    prompt_field: Annotated[str | None, option("source.prompt_field")] = None,
    template: Annotated[str | None, option("source.template")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the target's chat template.")] = False,
    where: Annotated[list[str] | None, option("source.where")] = None,
    limit: Annotated[int | None, option("source.limit")] = None,
    mlflow_uri: Annotated[str | None, option("publish.mlflow_uri")] = None,
    log_text: Annotated[OnOff | None, typer.Option(help=_LOG_TEXT_HELP, show_default=False)] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with any of the settings.")] = None,
    settings: _Settings = None,
) -> None:
    """Replay prompt sources, one after another, as one stream.

    The drafter proposes, the target verifies, the drafter learns; every token decision is logged under the run's
    folder and every drafter version goes to MLflow.
    """
    given = dict(locals())
    overrides: dict[str, object] = {key: given[name] for name, key in _OPTIONS.items() if given[name] is not None}
    overrides |= {key: tuple(given[name]) for name, key in _LISTS.items() if given[name]}
    overrides |= {key: value for name, (key, value) in _FLAGS.items() if given[name]}
    if log_text:
        overrides["log.text"] = log_text is OnOff.ON
    if resume:
        _resume(resume, overrides | {"--config": config, "--set": settings})
    else:
        _begin((load(config) if config else Config()).with_overrides(parsed(settings or []) | overrides))


def _begin(config: Config) -> None:
    from pipeline.run_folder import is_unfinished, new_run_folder

    run_folder = config.run or new_run_folder(Path("runs"), time.gmtime())
    question = f"{run_folder} holds a run that is not finished. Go on with it, with its own settings?"
    if is_unfinished(run_folder) and sys.stdin.isatty() and typer.confirm(question, default=True):
        _resume(run_folder, {})
    else:
        _run(config, run_folder, resume=False)


def _resume(run_folder: Path, overrides: Mapping[str, object]) -> None:
    """Go on with the settings of the run; only where MLflow is may have changed."""
    from pipeline.leftovers import send_leftovers
    from pipeline.run_folder import CONFIG, is_unfinished

    given = {key: value for key, value in overrides.items() if value not in (None, [])}
    foreign = ", ".join(given.keys() - {"publish.mlflow_uri"})
    if foreign:
        raise ConfigError(
            f"a run goes on with the settings that it began with, so --resume takes no other: got {foreign}"
        )
    if not (run_folder / CONFIG).is_file():
        raise RunError(f"{run_folder} must hold a run to go on with, but has no {CONFIG}; begin one with --run")
    config = load(run_folder / CONFIG).with_overrides(given)
    if is_unfinished(run_folder):
        _run(config, run_folder, resume=True)
    else:
        print(send_leftovers(config, run_folder))


def _run(config: Config, run_folder: Path, *, resume: bool) -> None:
    from rich.console import Console

    from pipeline.progress import make_display
    from pipeline.replay import Replay
    from pipeline.tables import summary_table

    console = Console(stderr=True)
    notice = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with console.status("loading models"):
        prepared = Replay(config, run_folder, config.publish.mlflow_uri, notice, resume=resume)
    with make_display(console, time.perf_counter, prepared.total()) as display:
        summary = prepared.run(display)
    Console().print(summary_table(summary))
    notice(_commits_line(summary))
    notice(f"run: {run_folder}")
    if summary["stopped"]:
        notice(f"go on with: omnidraft replay --resume {run_folder}")
        raise typer.Exit(130)


def _commits_line(summary: Mapping[str, Any]) -> str:
    costs = summary["commits"]
    return (
        f"commits: {costs['commits']}, for which the stream stood still for {costs['seconds']:.2f} s "
        f"({costs['seconds'] / costs['of']:.1%} of the time); beside it {costs['seconds_beside']:.2f} s"
    )
