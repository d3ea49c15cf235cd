"""`omnidraft ui`: what MLflow holds, in its own pages in the browser; without torch."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli_registry import MODEL, NameOption, RunsOption
from store.errors import UsageError

HOST = "127.0.0.1"  # the pages have no password, so no other machine may see them


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
