"""`omnidraft versions` and `omnidraft ui`: what MLflow holds, in the terminal and in the browser; without torch."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from store.errors import UsageError

if TYPE_CHECKING:
    from store.versions import RegisteredVersion, VersionDetails

HOST = "127.0.0.1"  # the pages have no password, so no other machine may see them
MODEL = "omnidraft-drafter"
PIPE_COLUMNS = 200  # wide enough that a table in a pipe is not folded
_HEADS = ("number", "run", "offset", "reason", "parent", "acceptance", "cache", "aliases", "published (UTC)")


class Action(StrEnum):
    """What `omnidraft versions` does."""

    LIST = "list"
    SHOW = "show"


class Format(StrEnum):
    """How it is printed."""

    TABLE = "table"
    JSON = "json"


RunsOption = Annotated[Path, typer.Option("--runs", help="A folder of runs; its mlflow.db is the store.")]
NameOption = Annotated[str, typer.Option("--name", help="The registered model.")]


def versions(
    action: Annotated[Action, typer.Argument(help="All versions, or one of them.")] = Action.LIST,
    number: Annotated[int | None, typer.Argument(metavar="N", help="Which one to show.", show_default=False)] = None,
    mlflow_uri: Annotated[
        str | None, typer.Option("--mlflow-uri", help="Another MLflow store or server.", show_default=False)
    ] = None,
    runs: RunsOption = Path("runs"),
    name: NameOption = MODEL,
    output: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.TABLE,
) -> None:
    """List the published drafters, or show where one came from, its figures and how to use it."""
    from store.registry import default_uri, list_versions, show_version

    uri = mlflow_uri or default_uri(runs)
    if action is Action.SHOW and number is not None:
        _print_details(show_version(uri, name, number), name, output)
    elif action is Action.SHOW:
        raise UsageError("`versions show` must name a version, got none; try `omnidraft versions show 1`")
    elif number is not None:
        raise UsageError(f"`versions list` takes no number, got {number}; try `omnidraft versions show {number}`")
    else:
        _print_list(list_versions(uri, name), name, output)


def ui(
    runs: RunsOption = Path("runs"),
    name: NameOption = MODEL,
    port: Annotated[int, typer.Option(help=f"On {HOST}.", min=1, max=65535)] = 5000,
) -> None:
    """Show the local store in MLflow's own pages, to this machine only, until Ctrl-C."""
    from store.registry import default_uri, experiment_id

    uri = default_uri(runs)
    experiment = experiment_id(uri)
    _must_be_free(port)
    with _server(_command(uri, runs, port)) as server:
        print(f"MLflow's pages over {runs} open here in some seconds; Ctrl-C ends them:")
        for title, page in _pages(experiment, name).items():
            print(f"  {title:<9} http://{HOST}:{port}/#/{page}", flush=True)
        status = server.wait()
    raise UsageError(f"MLflow's server must stay up until Ctrl-C, but ended with status {status}; see what it printed")


def _pages(experiment: str, name: str) -> dict[str, str]:
    """Without this type of workflow MLflow opens in another mode, which hides registered models."""
    return {
        "runs": f"experiments/{experiment}/runs?compareRunsMode=CHART&workflowType=machine_learning",
        "versions": f"models/{name}?workflowType=machine_learning",
    }


def _command(uri: str, runs: Path, port: int) -> list[str]:
    artifacts = (runs.resolve() / "mlartifacts").as_uri()
    store = ["--backend-store-uri", uri, "--default-artifact-root", artifacts]
    listen = ["--host", HOST, "--port", str(port), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
    return [sys.executable, "-m", "mlflow", "ui", *store, *listen]


def _must_be_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(f"port {port} must be free, but: {error.strerror}; try --port {port + 1}") from error


@contextmanager
def _server(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The running server; Ctrl-C and SIGTERM end the block without an error, and all of the server's processes."""
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes that only the other mode's pages need
        "PYTHONWARNINGS": "ignore",  # about the server's own libraries
    }
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored where a shell started us in the background
        signal.signal(number, signal.default_int_handler)
    server = subprocess.Popen(
        command, env=os.environ | quiet, start_new_session=True, stdout=subprocess.DEVNULL
    )  # a session of its own: the terminal's Ctrl-C reaches us alone, and we end its processes in order
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
            server.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _print_list(found: Sequence["RegisteredVersion"], name: str, output: Format) -> None:
    if output is Format.JSON:
        print(json.dumps([asdict(version) for version in found], default=str, indent=2))
    elif found:
        _print_table(_HEADS, map(_row, found))
    else:
        print(f"{name} has no version yet; `omnidraft replay` publishes some")


def _row(version: "RegisteredVersion") -> list[str]:
    acceptance = None if version.acceptance is None else f"{version.acceptance:.3f}"
    aliases, when = ", ".join(version.aliases), f"{version.created_at:%Y-%m-%d %H:%M}"
    told = (version.number, version.run, version.offset, version.reason, version.parent)
    return [_text(value) for value in (*told, acceptance, version.cache_entries, aliases, when)]


def _print_details(details: "VersionDetails", name: str, output: Format) -> None:
    if output is Format.JSON:
        print(json.dumps(asdict(details), default=str, indent=2))
        return
    manifest = details.manifest
    files = {file: f"sha256 {digest[:16]}…" for file, digest in manifest["files"].items()}
    plain = {key: value for key, value in manifest.items() if key not in ("files", "counters")}
    for title, values in (
        ("manifest", plain),
        ("counters", manifest["counters"]),
        ("files", files),
        ("metrics", details.metrics),
        ("settings", details.params),
        ("tags", {**details.tags, "aliases": ", ".join(details.summary.aliases)}),
    ):
        _print_table((title, ""), ((key, _text(value)) for key, value in sorted(values.items())))
    print(f"use it: omnidraft replay --drafter models:/{name}/{details.summary.number}")


def _print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    console.print(table, "")


def _text(value: object) -> str:
    """One printable line; what a server sends must not steer the terminal."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
