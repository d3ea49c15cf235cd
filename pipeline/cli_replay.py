"""`omnidraft replay`: the main job."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import option, parsed
from pipeline.config import Config, load
from store.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.replay import Replay
    from pipeline.scale_run import ScaledReplay
    from store.object_store_mirror import Mirror

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


@dataclass(frozen=True)
class Several:
    """Workers on a Ray cluster."""

    address: str
    workers: int


class OnOff(StrEnum):
    """Whether."""

    ON = "on"
    OFF = "off"


_LOG_TEXT_HELP = "Whether the log keeps prompts, texts and tokens' bytes; ids are kept in any case."
_RESUME_HELP = (
    "Go on with the unfinished run in this folder or at s3://BUCKET/PATH, from its last commit and with its settings."
)
_Resumed = Annotated[Path | None, typer.Option(metavar="DIR", help=_RESUME_HELP, show_default=False)]
_RAY_HELP = (
    "Decode with several workers on Ray: local (also without an address) for one that lives as long as the run, auto "
    "for the cluster of this machine, HOST:PORT of another."
)
_Ray = Annotated[str | None, typer.Option(metavar="ADDRESS", help=_RAY_HELP, show_default=False)]
_WORKERS_HELP = "With --ray: how many workers, which may be changed later in the file 'workers' of the run."
_Workers = Annotated[int | None, typer.Option(min=1, metavar="N", help=_WORKERS_HELP, show_default="1")]
_SET_HELP = "Any other setting, such as learn.rate=0.002; may be repeated."
_Settings = Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP, metavar="KEY=VALUE")]


def replay(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Parquet, JSONL or CSV files, - for JSONL on standard input, hf://owner/dataset[/config]:split, "
            "ray:FOLDER/*.parquet (Ray Data, also from s3://...), kafka://HOST:PORT/TOPIC[?partition=N&follow=true], "
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
    ray: _Ray = None,
    workers: _Workers = None,
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
    several = _several(ray, workers)
    if resume:
        _resume(resume, overrides | {"--config": config, "--set": settings}, several)
    else:
        _begin((load(config) if config else Config()).with_overrides(parsed(settings or []) | overrides), several)


def _several(address: str | None, workers: int | None) -> Several | None:
    if workers and not address:
        raise ConfigError(f"--workers needs --ray, got {workers} workers and no address; try --ray local")
    return Several(address, workers or 1) if address else None


def _begin(config: Config, several: Several | None) -> None:
    from pipeline.run_folder import RUNS, is_unfinished, new_run_folder, opened

    run = config.run or new_run_folder(RUNS, time.gmtime())
    run_folder, mirror = opened(run, new=True)
    question = f"{mirror.name} holds a run that is not finished. Go on with it, with its own settings?"
    if is_unfinished(run_folder) and sys.stdin.isatty() and typer.confirm(question, default=True):
        _resume(run, {}, several)
    else:
        _run(config, run_folder, mirror, several, resume=False)


def _resume(run: Path, overrides: Mapping[str, object], several: Several | None) -> None:
    """Go on with the settings of the run; only where MLflow is may have changed."""
    from pipeline.leftovers import send_leftovers
    from pipeline.run_folder import CONFIG, is_unfinished, opened

    given = {key: value for key, value in overrides.items() if value not in (None, [])}
    foreign = ", ".join(given.keys() - {"publish.mlflow_uri"})
    if foreign:
        raise ConfigError(
            f"a run goes on with the settings that it began with, so --resume takes no other: got {foreign}"
        )
    run_folder, mirror = opened(run)
    if not (run_folder / CONFIG).is_file():
        raise RunError(f"{mirror.name} must hold a run to go on with, but has no {CONFIG}; begin one with --run")
    config = load(run_folder / CONFIG).with_overrides(given)
    if is_unfinished(run_folder):
        _run(config, run_folder, mirror, several, resume=True)
    else:
        print(send_leftovers(config, run_folder, mirror))


def _run(config: Config, run_folder: Path, mirror: "Mirror", several: Several | None, *, resume: bool) -> None:
    from rich.console import Console

    from pipeline.progress import make_display
    from pipeline.tables import summary_table

    console = Console(stderr=True)
    notice = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with console.status("loading models"):
        prepared = _prepared(config, run_folder, mirror, several, notice, resume)
    with make_display(console, time.perf_counter, prepared.total()) as display:
        summary = prepared.run(display)
    Console().print(summary_table(summary))
    notice(_commits_line(summary))
    notice(f"run: {mirror.name}")
    if summary["stopped"]:
        notice(f"go on with: omnidraft replay --resume {mirror.name}{f' --ray {several.address}' if several else ''}")
        raise typer.Exit(130)


def _prepared(
    config: Config,
    run_folder: Path,
    mirror: "Mirror",
    several: Several | None,
    notice: Callable[[str], None],
    resume: bool,
) -> "Replay | ScaledReplay":
    if several is None:
        from pipeline.replay import Replay
        from store.partitions import worker_folders

        if resume and worker_folders(run_folder):
            raise RunError(f"the run in {mirror.name} was begun with --ray; add it to go on, such as --ray local")
        return Replay(config, run_folder, config.publish.mlflow_uri, notice, resume=resume, mirror=mirror)
    try:
        from pipeline.scale_run import ScaledReplay
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("--ray needs the package ray: pip install 'omnidraft[ray]'") from None
    return ScaledReplay(
        config,
        run_folder,
        config.publish.mlflow_uri,
        notice,
        resume=resume,
        mirror=mirror,
        address=several.address,
        workers=several.workers,
    )


def _commits_line(summary: Mapping[str, Any]) -> str:
    costs = summary["commits"]
    return (
        f"commits: {costs['commits']}, for which the stream stood still for {costs['seconds']:.2f} s "
        f"({costs['seconds'] / costs['of']:.1%} of the time); beside it {costs['seconds_beside']:.2f} s"
    )
