"""`omnidraft dashboard`: pages over the log, in the browser; without torch and mlflow."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from store.errors import RunError

PATIENCE = 10  # seconds for the server to end before it is made to


def dashboard(
    run: Annotated[Path | None, typer.Option("--run", help="One run's folder.", show_default=False)] = None,
    runs: Annotated[Path, typer.Option("--runs", help="A folder of runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="0 takes any that is free.", min=0, max=65535)] = 8050,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on instead of 127.0.0.1; lets other machines read all texts.", show_default=False
        ),
    ] = None,
) -> None:
    """Show runs, texts, n-grams, versions and SQL in the browser, until Ctrl-C; a run that goes on is followed."""
    where = ["--run", str(run)] if run else ["--runs", str(runs)]
    listen = [] if host is None else ["--host", host]
    command = [sys.executable, "-m", "dashboards.serve", *where, *listen, "--port", str(port)]
    status = _until_ended(command)
    if status:
        raise typer.Exit(status)


def _until_ended(command: list[str]) -> int:
    """The server's exit status; Ctrl-C and SIGTERM end it in order, which is no error.

    In a process of its own: the dashboards read files, and nothing here imports them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored where a shell started us in the background
        signal.signal(number, signal.default_int_handler)
    try:
        # A session of its own: the terminal's Ctrl-C reaches us alone.
        server = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        raise RunError(f"the server of the dashboards must start, but: {error.strerror}") from error
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
