"""The command `omnidraft bench-serve`: put a server under load and measure it."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.config.cli_options import (
    JsonOption,
    MarkdownOption,
    argument,
    option,
    overrides_of,
    parse_settings,
    set_option,
)
from pipeline.reports.artifacts import draw_results
from pipeline.reports.terminal import require_extra, require_folders, require_plot_file, status
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.bench.server.client import Workload
    from pipeline.config.settings import Config

SECONDS, ROUND_SECONDS = 120.0, 20.0
_URL_HELP = "URL of a running server with OpenAI's interface. Default: start `omnidraft serve`, and stop it afterwards."
_KEY_HELP = "API key sent as a bearer token to the server at --url."
_SET_HELP = "Any other setting of the started server or of the prompt sources; may be repeated."
_RUN_HELP = "Folder in which the started server keeps its run. Default: a temporary folder."
_SECONDS_HELP = "Measured seconds of load; with --compare-learning, seconds of a round. [default: 120; a round 20]"
_VERIFY_HELP = (
    "Compare greedy answers with plain decoding by the target after the load. [default: if the target is known]"
)
_COMPARE_HELP = "Instead, compare the time between tokens with and without learning, at the same request rate, in turn."
_RATE_HELP = "Requests per second with --compare-learning. [default: half of what a full load completes]"


def bench_serve(
    sources: Annotated[list[str] | None, argument("sources", "Prompt sources, as for `replay`.", "SOURCE")] = None,
    url: Annotated[str | None, typer.Option(help=_URL_HELP)] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OMNIDRAFT_API_KEY", help=_KEY_HELP)] = None,
    target: Annotated[str | None, option("targets", "Target model; with --url, the target of that server.")] = None,
    learn: Annotated[str | None, option("serve.learn")] = None,
    settings: Annotated[list[str] | None, set_option(_SET_HELP)] = None,
    run: Annotated[Path | None, typer.Option(help=_RUN_HELP)] = None,
    clients: Annotated[
        int, typer.Option(min=1, help="Concurrent clients, each sending its next request after the previous answer.")
    ] = 64,
    seconds: Annotated[float | None, typer.Option(min=1, help=_SECONDS_HELP)] = None,
    warm_up: Annotated[float, typer.Option(min=0, help="Warm-up in seconds of the same load, not measured.")] = 5.0,
    stream: Annotated[float, typer.Option(min=0, max=1, help="Share of requests with a streamed answer.")] = 0.75,
    chat: Annotated[float, typer.Option(min=0, max=1, help="Share of chat requests.")] = 0.5,
    greedy: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests at temperature 0; the others have 1.")
    ] = 0.5,
    leave: Annotated[float, typer.Option(min=0, max=1, help="Share of streams that clients disconnect midway.")] = 0.05,
    max_tokens: Annotated[str, typer.Option(help="Completion lengths in tokens, comma-separated.")] = "16,32,64,128",
    seed: Annotated[int, typer.Option(help="Random seed of the workload.")] = 0,
    verify: Annotated[bool | None, typer.Option(help=_VERIFY_HELP)] = None,
    compare_learning: Annotated[bool, typer.Option("--compare-learning", help=_COMPARE_HELP)] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Measurement rounds with --compare-learning.")] = 6,
    rate: Annotated[float | None, typer.Option(min=0.001, help=_RATE_HELP)] = None,
    markdown: MarkdownOption = None,
    json_file: JsonOption = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write a plot of the server over time: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Measure a server under load from concurrent clients: tokens per second, time to the first token and between
    tokens, errors, acceptance and memory over time. Compare its greedy answers with plain decoding by the target."""
    require_extra("omnidraft bench-serve", "bench", "aiohttp", "psutil")
    require_folders(markdown, json_file, picture)
    require_plot_file(picture)
    if url and (compare_learning or run):
        raise UsageError(
            "--compare-learning and --run are for servers that are started here, not for the server at --url"
        )
    if verify and url and not target:
        raise UsageError("--verify needs the target of the server at --url; name it with --target")
    overrides = overrides_of(bench_serve, locals()) | parse_settings(settings)
    workload = _make_workload(max_tokens, stream=stream, chat=chat, greedy=greedy, leave=leave)
    shape = {"clients": clients, "seconds": seconds, "warm_up": warm_up}
    task = _Task(overrides, workload, shape, seed)
    with status() as progress:
        if compare_learning:
            text, found = _compare_learning(task, rounds, rate, progress)
        else:
            verified = verify is not False and not (url and not target)
            text, found = _measure_load(task, url, api_key, run, verified, progress)
    print(text)
    _write(text, found, markdown, json_file, picture)


@dataclass(frozen=True)
class _Task:
    """Settings and workload of both kinds of measurement.

    Attributes:
        overrides: settings by dotted key.
        shape: clients, seconds and warm-up seconds of the load.
        seed: random seed of the workload.
    """

    overrides: Mapping[str, Any]
    workload: "Workload"
    shape: Mapping[str, Any]
    seed: int

    @property
    def config(self) -> "Config":
        from pipeline.config.settings import Config

        return Config().with_overrides(dict(self.overrides))

    @property
    def server_options(self) -> list[str]:
        """Options for `omnidraft serve`: every setting given, except those of the prompt sources."""
        options: list[str] = []
        for key, value in self.overrides.items():
            if key != "sources" and not key.startswith("source."):
                options += ["--set", f"{key}={json.dumps(value)}"]
        return options


def _make_workload(max_tokens: str, **shares: float) -> "Workload":
    from pipeline.bench.server.client import Workload

    try:
        lengths = tuple(int(length) for length in max_tokens.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise UsageError(f"--max-tokens must be comma-separated numbers above 0, got '{max_tokens}'")
    return Workload(**shares, max_tokens=lengths)


def _measure_load(
    task: _Task, url: str | None, key: str | None, run: Path | None, verified: bool, progress: Callable[[str], None]
) -> tuple[str, dict[str, Any]]:
    """Measure a full load. Returns the tables as Markdown and the results as JSON values."""
    from pipeline.bench.server import benchmark as bench
    from pipeline.bench.server import report as bench_serve_report
    from pipeline.bench.server.server import OwnServer

    prompts, machine = bench.prompts_of(task.config), bench.machine_of()
    shape = {**task.shape, "seconds": task.shape["seconds"] or SECONDS}
    plan = bench.LoadPlan(**shape, workload=task.workload, seed=task.seed)
    with TemporaryDirectory(prefix="omnidraft-bench-serve-") as scratch:
        folder = Path(scratch)
        progress("starting a server")
        own = None if url else OwnServer(task.server_options, folder, run or folder / "runs" / "run")
        with own or nullcontext():
            place, pid = (own.url, own.pid) if own else (str(url), None)
            loaded = bench.load_server(place, key if url else None, pid, prompts, plan, progress)
            progress("stopping the server")
        found = bench.verify_load(task.config, folder, loaded, progress) if verified else None
    report = bench.report_of(loaded, machine, plan.clients, found)
    return bench_serve_report.markdown(report), asdict(report)


def _compare_learning(
    task: _Task, rounds: int, rate: float | None, progress: Callable[[str], None]
) -> tuple[str, dict[str, Any]]:
    """Compare serving with and without learning. Returns the tables as Markdown and the results as JSON values."""
    from pipeline.bench.server import benchmark as bench
    from pipeline.bench.server import report as bench_serve_report
    from pipeline.bench.server.learning_cost import Rounds

    prompts, machine = bench.prompts_of(task.config), bench.machine_of()
    shape = {**task.shape, "seconds": task.shape["seconds"] or ROUND_SECONDS}
    plan = Rounds(number=rounds, rate=rate, **shape)
    with TemporaryDirectory(prefix="omnidraft-bench-serve-") as scratch:
        options = task.server_options
        found = bench.compare_learning(options, Path(scratch), prompts, task.workload, task.seed, plan, progress)
    text = bench_serve_report.comparison_markdown(found, machine, task.config.targets[0])
    return text, {"machine": machine, **asdict(found)}


def _write(text: str, found: dict[str, Any], markdown: Path | None, json_file: Path | None, plot: Path | None) -> None:
    if markdown:
        markdown.write_text(text + "\n", encoding="utf-8")
    results = json.dumps(found, indent=1) + "\n"
    if json_file:
        json_file.write_text(results, encoding="utf-8")
    if plot:
        draw_results("load", results, plot)
