"""`omnidraft bench-serve`: a server under load."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import option, parsed
from store.errors import RunError, UsageError

if TYPE_CHECKING:
    from pipeline.bench_serve_mix import Mix
    from pipeline.config import Config

SECONDS, ROUND_SECONDS = 120.0, 20.0
_PICTURES = (".png", ".svg", ".pdf")
_URL_HELP = "A server that runs, of any make. By default one of ours is started, and ended afterwards."
_KEY_HELP = "Sent as a bearer's to the server of --url."
_SET_HELP = "Any setting of the server that is started, or of the sources; may be repeated."
_RUN_HELP = "The run's folder of the server that is started, kept. By default it is removed."
_SECONDS_HELP = "Of the load, or of a round. [default: 120, of a round 20]"
_VERIFY_HELP = "Compare greedy answers with plain decoding of the target, afterwards. [default: where it is known]"
_COMPARE_HELP = "Instead: times between tokens with learning and without, in turn, at the same rate of requests."
_RATE_HELP = "Requests per second of --compare-learning. [default: half of what a full load completes]"


def bench_serve(
    sources: Annotated[
        list[str] | None, typer.Argument(help="Prompt sources, as for `replay`.", metavar="SOURCE", show_default=False)
    ] = None,
    url: Annotated[str | None, typer.Option(help=_URL_HELP, show_default=False)] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OMNIDRAFT_API_KEY", help=_KEY_HELP)] = None,
    target: Annotated[str | None, typer.Option(help="Target model; with --url, that of its server.")] = None,
    learn: Annotated[str | None, option("serve.learn")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_SET_HELP)] = None,
    run: Annotated[Path | None, typer.Option(help=_RUN_HELP, show_default=False)] = None,
    clients: Annotated[int, typer.Option(min=1, help="At the same time, each waiting for its answer.")] = 64,
    seconds: Annotated[float | None, typer.Option(min=1, help=_SECONDS_HELP, show_default=False)] = None,
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds of the same load before them.")] = 5.0,
    stream: Annotated[float, typer.Option(min=0, max=1, help="Share of streamed answers.")] = 0.75,
    chat: Annotated[float, typer.Option(min=0, max=1, help="Share of chats.")] = 0.5,
    greedy: Annotated[float, typer.Option(min=0, max=1, help="Share at temperature 0; others have 1.")] = 0.5,
    leave: Annotated[float, typer.Option(min=0, max=1, help="Share of streams whose clients leave midway.")] = 0.05,
    max_tokens: Annotated[str, typer.Option(help="Of a completion; several with commas between.")] = "16,32,64,128",
    seed: Annotated[int, typer.Option(help="Of what is asked, and when.")] = 0,
    verify: Annotated[bool | None, typer.Option(help=_VERIFY_HELP, show_default=False)] = None,
    compare_learning: Annotated[bool, typer.Option("--compare-learning", help=_COMPARE_HELP)] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of --compare-learning.")] = 6,
    rate: Annotated[float | None, typer.Option(min=0.001, help=_RATE_HELP, show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables there as well.", show_default=False)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the server over time: .png, .svg or .pdf.")] = None,
) -> None:
    """Load a server as many clients would, and measure: tokens per second, times to the first token and between tokens,
    errors, acceptance and memory over time, and whether greedy answers are the target's own."""
    _require_places(markdown, json_file, picture)
    if url and (compare_learning or run):
        raise UsageError("--compare-learning and --run are for servers that are started here, not for that of --url")
    if verify and url and not target:
        raise UsageError("--verify needs the target of the server of --url; name it with --target")
    overrides: dict[str, Any] = {"targets": (target,) if target else None, "serve.learn": learn}
    overrides |= {"sources": tuple(sources) if sources else None} | parsed(settings or [])
    mix = _mix(max_tokens, stream=stream, chat=chat, greedy=greedy, leave=leave)
    shape = {"clients": clients, "seconds": seconds, "warm_up": warm_up}
    task = _Task({key: value for key, value in overrides.items() if value is not None}, mix, shape, seed)
    with _status() as progress:
        if compare_learning:
            text, found = _compared(task, rounds, rate, progress)
        else:
            verified = verify is not False and not (url and not target)
            text, found = _loaded(task, url, api_key, run, verified, progress)
    print(text)
    _write(text, found, markdown, json_file, picture)


@dataclass(frozen=True)
class _Task:
    """What both kinds of measurement need."""

    overrides: Mapping[str, Any]
    mix: "Mix"
    shape: Mapping[str, Any]
    seed: int

    @property
    def config(self) -> "Config":
        from pipeline.config import Config

        return Config().with_overrides(dict(self.overrides))

    @property
    def server_options(self) -> list[str]:
        """Of `omnidraft serve`: all that was set, apart from where prompts come from."""
        told: list[str] = []
        for key, value in self.overrides.items():
            if key != "sources" and not key.startswith("source."):
                told += ["--set", f"{key}={json.dumps(value)}"]
        return told


def _mix(max_tokens: str, **shares: float) -> "Mix":
    from pipeline.bench_serve_mix import Mix

    try:
        lengths = tuple(int(length) for length in max_tokens.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise UsageError(f"--max-tokens must be numbers above 0 with commas between, got '{max_tokens}'")
    return Mix(**shares, max_tokens=lengths)


def _require_places(*places: Path | None) -> None:
    for place in places:
        if place and not place.absolute().parent.is_dir():
            raise RunError(f"{place} must be in a folder that exists; make {place.parent} first")
    if (picture := places[-1]) and picture.suffix not in _PICTURES:
        raise UsageError(f"--picture must end in one of {', '.join(_PICTURES)}, got '{picture}'")


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """A line on standard error while it runs; nothing of it stays."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def _loaded(
    task: _Task, url: str | None, key: str | None, run: Path | None, verified: bool, progress: Callable[[str], None]
) -> tuple[str, dict[str, Any]]:
    """The tables and the figures of a full load."""
    from pipeline import bench_serve as bench
    from pipeline import bench_serve_report
    from pipeline.bench_serve_server import OwnServer

    prompts, machine = bench.prompts_of(task.config), bench.machine_of()
    shape = {**task.shape, "seconds": task.shape["seconds"] or SECONDS}
    plan = bench.Plan(**shape, mix=task.mix, seed=task.seed)
    with TemporaryDirectory(prefix="omnidraft-bench-serve-") as scratch:
        folder = Path(scratch)
        progress("starting a server")
        own = None if url else OwnServer(task.server_options, folder, run or folder / "runs" / "run")
        with own or nullcontext():
            place, pid = (own.url, own.pid) if own else (str(url), None)
            loaded = bench.load_server(place, key if url else None, pid, prompts, plan, progress)
            progress("the server ends")
        found = bench.verified_by(task.config, folder, loaded, progress) if verified else None
    report = bench.report_of(loaded, machine, plan.clients, found)
    return bench_serve_report.markdown(report), asdict(report)


def _compared(
    task: _Task, rounds: int, rate: float | None, progress: Callable[[str], None]
) -> tuple[str, dict[str, Any]]:
    """The tables and the figures of what learning costs."""
    from pipeline import bench_serve as bench
    from pipeline import bench_serve_report
    from pipeline.bench_serve_compare import Rounds

    prompts, machine = bench.prompts_of(task.config), bench.machine_of()
    shape = {**task.shape, "seconds": task.shape["seconds"] or ROUND_SECONDS}
    plan = Rounds(number=rounds, rate=rate, **shape)
    with TemporaryDirectory(prefix="omnidraft-bench-serve-") as scratch:
        options = task.server_options
        found = bench.compare_learning(options, Path(scratch), prompts, task.mix, task.seed, plan, progress)
    text = bench_serve_report.comparison_markdown(found, machine, task.config.targets[0])
    return text, {"machine": machine, **asdict(found)}


def _write(
    text: str, found: dict[str, Any], markdown: Path | None, json_file: Path | None, picture: Path | None
) -> None:
    from pipeline.pictures import draw

    if markdown:
        markdown.write_text(text + "\n", encoding="utf-8")
    told = json.dumps(found, indent=1) + "\n"
    if json_file:
        json_file.write_text(told, encoding="utf-8")
    if picture:
        with TemporaryDirectory() as scratch:
            figures = Path(scratch, "load.json")
            figures.write_text(told, encoding="utf-8")
            if reason := draw("load", str(figures), str(picture)):
                raise RunError(f"the picture {picture} must be writable: {reason}")
