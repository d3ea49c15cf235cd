"""`omnidraft replay` and `omnidraft serve`: a run over prompt sources, and one over live requests."""

import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from pipeline.cli.runs import LAST, last_unfinished, list_next_commands
from pipeline.config.cli_options import (
    RUN,
    SERVING,
    SETTINGS,
    ChatOption,
    NewRunsOption,
    PlainCommand,
    SetOption,
    argument,
    flag,
    option,
    overrides_of,
    parse_settings,
    separated_option,
)
from pipeline.config.defaults import (
    BATCH,
    TEMPERATURE,
    add_replay_defaults,
    is_default_run,
    make_default_run,
    with_serving_defaults,
)
from pipeline.config.environment import read_environment
from pipeline.config.settings import Config, load
from pipeline.reports.log_output import log_details
from pipeline.reports.terminal import make_summary_table, status, stderr_console
from store.collection import freeze_objects, pause_collection
from store.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.cluster.run import ClusterReplay
    from store.log.run_log import Mirror

LOG = logging.getLogger("omnidraft.cli")

MLFLOW = "publish.mlflow_uri"
API_KEY = "OMNIDRAFT_API_KEY"
Show = Callable[[Mapping[str, Any]], None]  # prints the summary of a run
Workers = Mapping[str, Any]  # address and number of workers on a Ray cluster; empty for a run in this process
RAY = "--ray"
SEVERAL = "Several machines"  # group of options

_SOURCES_HELP = (
    "Parquet, JSONL or CSV files, - for JSONL on standard input, hf://owner/dataset[/config]:split, "
    "ray:FOLDER/*.parquet (Ray Data, also from s3://...), kafka://HOST:PORT/TOPIC[?partition=N&follow=true], "
    "builtin:questions, builtin:docs, builtin:code, builtin:rust. [default: builtin:questions builtin:rust]"
)
_TARGETS_HELP = (
    "Target model: hub name, folder or builtin; may be repeated. A prompt names its target, or targets are used in "
    "turn. [default: smollm2-135m; with a SOURCE builtin:target-12m]"
)
_DRAFTER_HELP = (
    "Drafter: hub name, folder, builtin or models:/NAME/VERSION. [default: builtin:drafter-4m; of built-in targets "
    "builtin:drafter-1.6m]"
)
_NO_TEXT_HELP = "Keep ids in the log, but neither prompts nor texts."
_NO_LEARN_HELP = "Freeze the drafter and the head; the memory and the n-grams learn on."
_RESUME_HELP = (
    "Resume the unfinished run in this folder or at s3://BUCKET/PATH, from its last commit and with its settings; "
    "'last' is the newest one below --runs."
)
_RESUME_SERVER_HELP = (
    "Resume the run of an earlier server: its log, versions, drafter and settings; 'last' is the newest one below "
    "--runs."
)
_VERBOSE_HELP = "Log details too, such as forward passes and costs in use."
_JSON_HELP = "Print the summary of the run as JSON instead of the table."
_RAY_HELP = (
    "Decode with several workers on Ray: local (also without an address) for one that ends with the run, auto "
    "for the cluster of this machine, HOST:PORT of another."
)
_WORKERS_HELP = (
    "With --ray: how many workers, which may be changed later in the file 'workers' of the run. [default: 1]"
)
_KEY_HELP = "Clients must send this as `Authorization: Bearer KEY`. Better set in the environment than typed."
_DRAFT_HELP = "Most pieces drafted per block; 0 decodes plainly. [default: 5]"

# Options of both commands.
Drafter = Annotated[str | None, option("drafter", _DRAFTER_HELP)]
Device = Annotated[str | None, option("device")]
Dtype = Annotated[str | None, option("dtype")]
Weights = Annotated[str | None, option("weights")]
Threads = Annotated[int | None, option("threads")]
Seed = Annotated[int | None, option("seed")]
Run = Annotated[Path | None, option("run")]
MlflowUri = Annotated[str | None, option(MLFLOW)]
NoPublish = Annotated[bool, flag("publish.enabled", False, "--no-publish", "No versions and no MLflow.")]
DraftSources = Annotated[str | None, separated_option("draft.sources", "--draft-sources")]
NoLogText = Annotated[bool, flag("log.text", False, "--no-log-text", _NO_TEXT_HELP)]
ConfigFile = Annotated[
    Path | None, typer.Option(help="A TOML file with any of the settings.", rich_help_panel=SETTINGS)
]

Verbose = Annotated[bool, typer.Option("--verbose", "-v", callback=log_details, help=_VERBOSE_HELP)]


class RayAlone(PlainCommand):
    """`--ray` without an address is `--ray local`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if RAY in args:
            after = args.index(RAY) + 1
            if after == len(args) or args[after].startswith("-"):
                args = [*args[:after], "local", *args[after:]]
        return super().parse_args(ctx, args)


def replay(
    sources: Annotated[list[str] | None, argument("sources", _SOURCES_HELP)] = None,
    target: Annotated[list[str] | None, option("targets", _TARGETS_HELP)] = None,
    drafter: Drafter = None,
    swap: Annotated[list[str] | None, option("swaps")] = None,
    run: Run = None,
    runs: NewRunsOption = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help=_RESUME_HELP, rich_help_panel=RUN)] = None,
    temperature: Annotated[float | None, option("sampling.temperature")] = None,
    max_new_tokens: Annotated[int | None, option("sampling.max_new_tokens")] = None,
    max_draft: Annotated[int | None, option("draft.max_draft")] = None,
    draft_sources: DraftSources = None,
    batch: Annotated[int | None, option("batch")] = None,
    no_learn: Annotated[bool, flag("learn.enabled", False, "--no-learn", _NO_LEARN_HELP)] = False,
    no_publish: NoPublish = False,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    threads: Threads = None,
    template: Annotated[str | None, option("source.template")] = None,
    chat: ChatOption = None,
    where: Annotated[list[str] | None, option("source.where")] = None,
    limit: Annotated[int | None, option("source.limit")] = None,
    mlflow_uri: MlflowUri = None,
    no_log_text: NoLogText = False,
    ray: Annotated[str | None, typer.Option(RAY, metavar="ADDRESS", help=_RAY_HELP, rich_help_panel=SEVERAL)] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=_WORKERS_HELP, show_default=False, rich_help_panel=SEVERAL),
    ] = None,
    config: ConfigFile = None,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON_HELP)] = False,
    verbose: Verbose = False,
) -> None:
    """Replay prompt sources, one after another, as one stream.

    The drafter proposes, the target verifies, the drafter learns; every token decision is logged under the run's
    folder and every drafter version goes to MLflow.
    """
    overrides = overrides_of(replay, locals())
    if workers and not ray:
        raise ConfigError(f"--workers needs --ray, got {workers} workers and no address; try --ray local")
    cluster: Workers = {"address": ray, "workers": workers or 1} if ray else {}
    show = (lambda summary: print(json.dumps(summary, indent=2))) if as_json else _print_table
    if resume:
        from store.log.manifest import RunKind

        named = last_unfinished((RunKind.REPLAY, RunKind.CLUSTER), runs) if resume == LAST else resume
        _resume(named, overrides | {"--config": config, "--set": settings}, cluster, show)
    else:
        base = load(config) if config else Config()
        given = add_replay_defaults(base, read_environment() | parse_settings(settings) | overrides)
        _begin(choose_settings(base, given), runs, cluster, show)


def choose_settings(base: Config, given: Mapping[str, object]) -> Config:
    """Return the settings of a new replay: those of the default run where no source and no target is named."""
    chosen = base.with_overrides(given)  # what is wrong is refused before anything is fetched
    if not is_default_run(base, given):
        return chosen
    from pipeline.models.pull import find_default_target

    with status("looking for a model"):
        target = find_default_target(lambda line: LOG.info("%s", line))
    return make_default_run(base, given, target)


def _print_table(summary: Mapping[str, Any]) -> None:
    from rich.console import Console

    Console().print(make_summary_table(summary))


def _begin(config: Config, runs: Path, workers: Workers, show: Show) -> None:
    from pipeline.run.folder import is_unfinished, open_new_run

    run_folder, mirror = open_new_run(config.run, runs)
    question = f"{mirror.name} holds a run that is not finished. Resume it, with its own settings?"
    if is_unfinished(run_folder) and sys.stdin.isatty() and typer.confirm(question, default=True):
        _resume(Path(mirror.name), {}, workers, show)
    else:
        _run(config, run_folder, mirror, workers, show, resume=False)


def _resume(run: Path, overrides: Mapping[str, object], workers: Workers, show: Show) -> None:
    """Resume with the settings of the run; only the address of MLflow may differ."""
    from pipeline.run.folder import is_unfinished, open_run, resumed_config

    run_folder, mirror = open_run(run)
    given = {key: value for key, value in overrides.items() if value not in (None, [])}
    config = resumed_config(run_folder, mirror.name, given)
    if not is_unfinished(run_folder):
        raise RunError(
            f"the run in {mirror.name} is finished: there is nothing to resume; begin another, or send what MLflow has "
            f"not taken with `omnidraft versions sync {shlex.quote(mirror.name)}`"
        )
    _run(config, run_folder, mirror, workers, show, resume=True)


def _run(config: Config, run_folder: Path, mirror: "Mirror", workers: Workers, show: Show, *, resume: bool) -> None:
    from store.query.log_reader import LogReader
    from store.query.probe_gain import describe_newest
    from store.query.summary import ANSWERS

    with status("loading models", is_long=True), pause_collection():
        from stages.engine.checkpoints.deferred_imports import keep_arrow_alone

        keep_arrow_alone()
        from pipeline.reports.progress import make_display
        from pipeline.run.replay import Replay

        prepared: Replay | ClusterReplay
        if workers:
            prepared = _import_cluster()(config, run_folder, **workers, resume=resume, mirror=mirror)
        else:
            prepared = Replay(config, run_folder, resume=resume, mirror=mirror)
    with make_display(stderr_console(), time.perf_counter, prepared.total()) as display, freeze_objects():
        summary = prepared.run(display)
    show(summary)
    costs = summary["commits"]
    LOG.info(
        "commits: %d, which paused the stream for %.2f s (%.1f%% of the time); in parallel %.2f s",
        costs["commits"],
        costs["seconds"],
        100 * costs["seconds"] / costs["of"],
        costs["seconds_beside"],
        extra={"commit_seconds": costs["seconds"]},
    )
    LOG.info("run: %s", mirror.name, extra={"run": mirror.name})
    if (answers := run_folder / ANSWERS).exists():
        LOG.info("answers: %s", os.path.relpath(answers), extra={"answers": str(answers)})
    if summary["stopped"]:
        ray = f" --ray {workers['address']}" if workers else ""
        LOG.info("resume with: omnidraft replay --resume %s%s", shlex.quote(mirror.name), ray)
        raise typer.Exit(130)
    if not summary["totals"]["prompts"]:
        raise RunError(f"at least one prompt must be completed, but none was; {mirror.name}/rejected.jsonl has reasons")
    with LogReader([run_folder]) as log:
        for sentence in describe_newest(log):
            LOG.info("%s", sentence)
    commands = list_next_commands(config, mirror.name, len(summary["totals"]["versions"]))
    LOG.info("look at it with:\n  %s", "\n  ".join(commands), extra={"commands": commands})


def _import_cluster() -> "type[ClusterReplay]":
    try:
        from pipeline.cluster.run import ClusterReplay
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("--ray needs the package ray: pip install 'omnidraft[ray]'") from None
    return ClusterReplay


def serve(
    target: Annotated[str | None, option("targets", "Target model: hub name, folder or builtin.")] = None,
    drafter: Drafter = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVING)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.", rich_help_panel=SERVING)
    ] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar=API_KEY, help=_KEY_HELP, rich_help_panel=SERVING)] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Site whose pages may send requests; * for all.", rich_help_panel=SERVING),
    ] = None,
    served_model_name: Annotated[str | None, option("serve.model_name")] = None,
    learn: Annotated[str | None, option("serve.learn")] = None,
    batch: Annotated[int | None, option("batch", f"Requests decoded at the same time. [default: {BATCH}]")] = None,
    temperature: Annotated[
        float | None,
        option("sampling.temperature", f"Of requests that name none. [default: the makers', or {TEMPERATURE}]", min=0),
    ] = None,
    max_draft: Annotated[int | None, option("draft.max_draft", _DRAFT_HELP)] = None,
    draft_sources: DraftSources = None,
    run: Run = None,
    runs: NewRunsOption = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help=_RESUME_SERVER_HELP, rich_help_panel=RUN)] = None,
    no_log_text: NoLogText = False,
    no_publish: NoPublish = False,
    mlflow_uri: MlflowUri = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    threads: Threads = None,
    config: ConfigFile = None,
    settings: SetOption = None,
    verbose: Verbose = False,
) -> None:
    """Serve a target with a drafter, and learn from the requests.

    The endpoints are those of OpenAI's interface: /v1/models, /v1/completions, /v1/chat/completions, /v1/responses;
    besides /health and /metrics. Requests are prompts of a stream: they are logged below the run's folder, unless they
    have `"store": false`, and the drafter is trained on them in parallel.
    """
    overrides = overrides_of(serve, locals()) | parse_settings(settings)
    os.environ.pop(API_KEY, None)  # processes that the server starts do not need it
    from pipeline.run.folder import open_new_run, open_run, resumed_config
    from store.log.manifest import RunKind

    if resume:
        run_folder, mirror = open_run(last_unfinished((RunKind.SERVE,), runs) if resume == LAST else resume)
        given = overrides | ({"--config": config} if config else {})
        chosen = resumed_config(run_folder, mirror.name, given, section="serve")
    else:
        base, given = load(config) if config else Config(), read_environment() | overrides
        chosen = with_serving_defaults(base).with_overrides(_add_recommended(base, given))
        run_folder, mirror = open_new_run(chosen.run, runs)
    access = {"host": host, "api_key": api_key, "origins": allow_origin or ()}
    _serve(chosen, mirror.name, port, access, resume=bool(resume))


def _add_recommended(base: Config, given: Mapping[str, object]) -> dict[str, object]:
    """Return the settings that the user gave beside a file (`base`), with the sampling that the target's makers
    recommend where neither sets it.
    """
    from pipeline.models.recommended import find_sampling

    target, known = base.with_overrides(given).targets[0], {*base.list_given(), *given}
    fresh = {name: value for name, value in find_sampling(target).items() if f"sampling.{name}" not in known}
    if fresh:
        shown = ", ".join(f"{name} {value}" for name, value in fresh.items())
        LOG.info("sampling as the makers of %s recommend: %s", target, shown)
    return {f"sampling.{name}": value for name, value in fresh.items()} | dict(given)


def _serve(config: Config, run: str, port: int, access: dict[str, Any], *, resume: bool) -> None:
    from pipeline.assembly.stages import make_sampling_params
    from pipeline.serve.engine_process import EngineProcess
    from pipeline.serve.http.api import make_app
    from pipeline.serve.http.limits import Limits
    from pipeline.serve.http.metrics import Metrics
    from pipeline.serve.http.server import serve as serve_http
    from store.hosts import listen

    host = access["host"]
    listener = listen(host, port)  # before models are loaded for nothing
    metrics = Metrics(config.serve.model_name or config.targets[0])
    limits = Limits(deadline_seconds=config.serve.deadline_seconds)
    with status("loading models", is_long=True):
        engine = EngineProcess(config, run, metrics.count_event, resume=resume)
    with engine:
        app = make_app(engine, limits, metrics, defaults=make_sampling_params(config.sampling), **access)
        address = ("[{}]:{}" if ":" in host else "{}:{}").format(host, listener.getsockname()[1])
        LOG.info("serving %s on http://%s/v1", config.targets[0], address)
        LOG.info("run: %s", run, extra={"run": run})
        for number in (signal.SIGINT, signal.SIGTERM):  # those that come when uvicorn listens to them no more
            signal.signal(number, lambda *_: LOG.info("still committing; it ends by itself"))
        has_key = access["api_key"] is not None
        serve_http(app, listener, limits, has_key=has_key, failed=lambda: engine.failure is not None)
        LOG.info("committing what was done")
    LOG.info("resume with: omnidraft serve --resume %s", shlex.quote(str(run)))
