"""`omnidraft dashboard`: pages over the log or, with `--mlflow`, over what MLflow holds, in the browser; and
`omnidraft plot`.

Each runs in a process of its own, and none needs torch: dashboards read files, and nothing here imports them.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.runs import local_run
from pipeline.config.cli_options import RunOption, RunsOption
from pipeline.reports.artifacts import command_of, draw
from pipeline.reports.terminal import PLOT_SUFFIXES
from store.errors import OmnidraftError, RunError, UsageError
from store.hosts import listen
from store.object_store.uri import uri_of

SHUTDOWN_SECONDS = 10  # that a server may take to shut down before it is killed
LOOK_SECONDS = 5.0  # between two looks at a run on an object store
PORT, MLFLOW_PORT = 8050, 5000
_PORT_HELP = f"0 takes any that is free. [default: {PORT}, or {MLFLOW_PORT} with --mlflow]"
HOST = "127.0.0.1"  # MLflow's pages have no password, so no other machine may see them
_SOURCE_HELP = "A run's folder, or s3://BUCKET/PATH. [default: the newest run]"
_OUTPUT_HELP = "File to write: .png, .svg or .pdf, of tokens .html. [default: KIND.png, tokens.html]"


class PlotKind(StrEnum):
    """The kinds of plots."""

    CURVE = "curve"
    TOKENS = "tokens"


def dashboard(
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    port: Annotated[int | None, typer.Option(help=_PORT_HELP, min=0, max=65535, show_default=False)] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on instead of 127.0.0.1; lets other machines read all texts.")
    ] = None,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Show MLflow's own pages over the versions and runs in --runs instead.")
    ] = False,
) -> None:
    """Show runs, texts, n-grams, versions and SQL in the browser.

    Until Ctrl-C; the page follows a run in progress.
    """
    if mlflow:
        if run or host:
            raise UsageError(f"MLflow's pages show all of --runs, on {HOST} alone; leave out --run and --host")
        _show_mlflow(runs, MLFLOW_PORT if port is None else port)
        return
    remote = run if run and uri_of(run) else None
    where = ["--run", str(local_run(remote, runs) if remote else run)] if run else ["--runs", str(runs)]
    address = [] if host is None else ["--host", host]
    with _server(command_of("serve", *where, *address, "--port", str(PORT if port is None else port))) as server:
        while remote and server.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                server.wait(LOOK_SECONDS)
                break
            try:
                local_run(remote, runs)
            except OmnidraftError as error:  # the pages show what was fetched before
                typer.secho(f"omnidraft: {error}", err=True, fg="red")
        status = server.wait()
    if status:
        raise typer.Exit(status)


def _show_mlflow(runs: Path, port: int) -> None:
    from store.registry.mlflow_pages import list_pages
    from store.registry.registry import default_uri

    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes that only the other mode's pages need
        "PYTHONWARNINGS": "ignore",  # about the server's own libraries
    }
    uri = default_uri(runs)
    pages = list_pages(uri)
    listen(HOST, port).close()  # an error here is clearer than the server's
    store = ["--backend-store-uri", uri, "--default-artifact-root", (runs.resolve() / "mlartifacts").as_uri()]
    where = ["--host", HOST, "--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
    with _server(
        [sys.executable, "-m", "mlflow", "ui", *store, *where], env=os.environ | quiet, stdout=subprocess.DEVNULL
    ) as server:
        print(f"MLflow's pages over {runs} open here in some seconds; Ctrl-C ends them:")
        for title, page in pages.items():
            print(f"  {title:<10} http://{HOST}:{port}/#/{page}", flush=True)
        print("close the panel at the right of the pages, which MLflow opens by itself the first time", flush=True)
        status = server.wait()
    raise UsageError(f"MLflow's server must stay up until Ctrl-C, but ended with status {status}; see what it printed")


@contextmanager
def _server(command: Sequence[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The running server; Ctrl-C and SIGTERM end the command without an error, and all of the server's processes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored where a shell started us in the background
        signal.signal(number, signal.default_int_handler)
    try:  # a session of its own: the terminal's Ctrl-C reaches us alone, and we end its processes in order
        server = subprocess.Popen(command, start_new_session=True, **more)
    except OSError as error:
        raise RunError(f"the server of the pages must start, but: {error.strerror}") from error
    try:
        yield server
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(SHUTDOWN_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def plot(
    kind: Annotated[PlotKind, typer.Argument(help="What to plot.", metavar="KIND", show_default=False)],
    source: Annotated[Path | None, typer.Argument(help=_SOURCE_HELP, show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=_OUTPUT_HELP)] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Completions shown with tokens. [default: 12]", show_default=False)
    ] = None,
    runs: RunsOption = Path("runs"),
) -> None:
    """Plot a run, and print the name of the file.

    **curve**: acceptance along a run, with drifts and versions. **tokens**: some completions token by token, as one
    page.
    """
    file = output or Path("tokens.html" if kind is PlotKind.TOKENS else f"{kind}.png")
    suffixes = (".html",) if kind is PlotKind.TOKENS else PLOT_SUFFIXES
    if file.suffix not in suffixes:
        raise UsageError(f"--output of a plot of kind {kind} must end in {' or '.join(suffixes)}, got '{file}'")
    if prompts and kind is not PlotKind.TOKENS:
        raise UsageError(f"--prompts is for plots of kind {PlotKind.TOKENS}, got kind {kind}; leave it out")
    options = ["--prompts", str(prompts)] if prompts else []
    if reason := draw(
        "curve" if kind is PlotKind.CURVE else "token_view", str(local_run(source, runs)), str(file), *options
    ):
        raise RunError(reason.removeprefix("omnidraft: "))
    print(file)
