"""`omnidraft serve`: live requests through the interface that OpenAI's clients speak."""

import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import option, parsed
from pipeline.config import Config, load
from store.errors import ConfigError, RunError

if TYPE_CHECKING:
    from store.object_store_mirror import Mirror

BATCH = 8  # requests decoded together, where nothing else is said
TEMPERATURE = 1.0  # as OpenAI's

_OPTIONS = {
    "drafter": "drafter",
    "batch": "batch",
    "seed": "seed",
    "device": "device",
    "dtype": "dtype",
    "threads": "threads",
    "temperature": "sampling.temperature",
    "max_draft": "draft.max_draft",
    "learn": "serve.learn",
    "learn_share": "serve.learn_share",
    "waiting": "serve.waiting",
    "deadline": "serve.deadline_seconds",
    "chat_template": "source.chat_template",
    "mlflow_uri": "publish.mlflow_uri",
    "run": "run",
}
_KEY_HELP = "Clients must send this as `Authorization: Bearer KEY`. Better set in the environment than typed."
_RESUME_HELP = "Go on with the run of an earlier server: its log, versions, drafter and settings."
_DRAFT_HELP = "Most pieces drafted per block; 0 decodes plainly. [default: 5]"


def serve(
    target: Annotated[str | None, typer.Option(help="Target model: hub name, folder or builtin.")] = None,
    drafter: Annotated[str | None, option("drafter")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="OMNIDRAFT_API_KEY", help=_KEY_HELP)] = None,
    learn: Annotated[str | None, option("serve.learn")] = None,
    learn_share: Annotated[float | None, option("serve.learn_share")] = None,
    batch: Annotated[int | None, typer.Option(help=f"Requests decoded at the same time. [default: {BATCH}]")] = None,
    waiting: Annotated[int | None, option("serve.waiting")] = None,
    deadline: Annotated[float | None, option("serve.deadline_seconds")] = None,
    temperature: Annotated[
        float | None, typer.Option(help=f"Of requests that name none. [default: {TEMPERATURE}]", min=0)
    ] = None,
    max_draft: Annotated[int | None, typer.Option(help=_DRAFT_HELP)] = None,
    chat_template: Annotated[Path | None, option("source.chat_template")] = None,
    run: Annotated[Path | None, option("run")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help=_RESUME_HELP, show_default=False)] = None,
    no_log_text: Annotated[
        bool, typer.Option("--no-log-text", help="Keep ids in the log, but neither prompts nor texts.")
    ] = False,
    no_publish: Annotated[bool, typer.Option("--no-publish", help="No versions and no MLflow.")] = False,
    mlflow_uri: Annotated[str | None, option("publish.mlflow_uri")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    device: Annotated[str | None, option("device")] = None,
    dtype: Annotated[str | None, option("dtype")] = None,
    threads: Annotated[int | None, option("threads")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with any of the settings.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting; may be repeated.", metavar="KEY=VALUE")
    ] = None,
) -> None:
    """Serve a target with a drafter, and learn from the requests.

    The endpoints are those of OpenAI's interface: /v1/models, /v1/completions, /v1/chat/completions; besides /health
    and /metrics. Requests are prompts of a stream: they are logged below the run's folder, unless they say
    `"store": false`, and teach the drafter beside serving.
    """
    given = dict(locals())
    from pipeline.run_folder import RUNS, new_run_folder, opened

    overrides: dict[str, object] = {key: given[name] for name, key in _OPTIONS.items() if given[name] is not None}
    overrides |= {"targets": (target,)} if target else {}
    overrides |= {"publish.enabled": False} if no_publish else {}
    overrides |= {"log.text": False} if no_log_text else {}
    overrides |= parsed(settings or [])
    if resume:
        run_folder, mirror = opened(resume)
        chosen = _resumed(run_folder, mirror.name, overrides, config)
    else:
        chosen = _with_defaults(load(config) if config else Config()).with_overrides(overrides)
        run_folder, mirror = opened(chosen.run or new_run_folder(RUNS, time.gmtime()), new=True)
    _serve(chosen, run_folder, mirror, host, port, api_key, resume=bool(resume))


def _with_defaults(config: Config) -> Config:
    """A server's own defaults where a file says nothing else."""
    batch = {} if "batch" in config.model_fields_set else {"batch": BATCH}
    named = "temperature" in config.sampling.model_fields_set
    return config.with_overrides(batch if named else {**batch, "sampling.temperature": TEMPERATURE})


def _resumed(run_folder: Path, name: str, overrides: dict[str, object], config: Path | None) -> Config:
    """The settings of the run; where MLflow is and how much is served may have changed."""
    from pipeline.run_folder import CONFIG

    foreign = [key for key in overrides if key != "publish.mlflow_uri" and not key.startswith("serve.")]
    if foreign or config:
        raise ConfigError(
            "a server goes on with the settings that it began with, so --resume takes no others but those of the "
            f"section 'serve': got {', '.join(foreign) or '--config'}"
        )
    if not (run_folder / CONFIG).is_file():
        raise RunError(f"{name} must hold a run to go on with, but has no {CONFIG}; begin one with --run")
    return load(run_folder / CONFIG).with_overrides(overrides)


def _serve(
    config: Config, run_folder: Path, mirror: "Mirror", host: str, port: int, api_key: str | None, *, resume: bool
) -> None:
    from rich.console import Console

    from pipeline.serve_api import make_app
    from pipeline.serve_limits import Defaults, Limits
    from pipeline.serve_metrics import Metrics
    from pipeline.serve_run import Serving
    from pipeline.serve_uvicorn import listen
    from pipeline.serve_uvicorn import serve as serve_http

    console = Console(stderr=True)
    notice = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    listener = listen(host, port)  # before models are loaded for nothing
    metrics = Metrics(config.targets[0])
    limits = Limits(
        body_bytes=config.serve.body_bytes,
        choices=config.serve.choices,
        max_tokens=config.serve.max_tokens,
        deadline_seconds=config.serve.deadline_seconds,
        grace_seconds=config.serve.grace_seconds,
    )
    sampling = config.sampling
    defaults = Defaults(sampling.temperature, sampling.top_k, sampling.top_p)
    with console.status("loading models"):
        serving = Serving(config, run_folder, metrics.event, notice, resume=resume, mirror=mirror)
    with serving:
        app = make_app(serving.engine, limits, metrics, defaults=defaults, api_key=api_key, host=host)
        address = "[{}]:{}" if ":" in host else "{}:{}"
        notice(f"serving {config.targets[0]} on http://{address.format(host, listener.getsockname()[1])}/v1")
        notice(f"run: {mirror.name}")
        for number in (signal.SIGINT, signal.SIGTERM):  # those that come when uvicorn listens to them no more
            signal.signal(number, lambda *_: notice("still committing; it ends by itself"))
        serve_http(app, listener, limits, has_key=api_key is not None)
        notice("committing what was done")
    notice(f"go on with: omnidraft serve --resume {mirror.name}")
