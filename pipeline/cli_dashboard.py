"""`omnidraft dashboard`: pages over the log, in the browser; without torch and mlflow."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from store.errors import OmnidraftError, RunError
from store.object_store_uri import uri_of

PATIENCE = 10  # seconds for the server to end before it is made to
LOOK_SECONDS = 5.0  # between two looks at a run on an object store


def dashboard(
    run: Annotated[
        Path | None, typer.Option("--run", help="One run's folder, or s3://BUCKET/PATH.", show_default=False)
    ] = None,
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
    remote = run if run and uri_of(run) else None
    where = ["--run", str(_local(remote) if remote else run)] if run else ["--runs", str(runs)]
    listen = [] if host is None else ["--host", host]
    command = [sys.executable, "-m", "dashboards.serve", *where, *listen, "--port", str(port)]
    status = _until_ended(command, remote)
    if status:
        raise typer.Exit(status)


def _local(remote: Path) -> Path:
    """What is fetched of a run on an object store."""
    from store.object_store_run import local_copy

    return local_copy(remote)


def _until_ended(command: list[str], remote: Path | None) -> int:
    """The server's exit status; Ctrl-C and SIGTERM end it in order, which is no error. Meanwhile a run on an object
    store is fetched again and again.

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
        while remote and server.poll() is None:
            _follow(remote, server)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _end(server)


def _follow(remote: Path, server: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        server.wait(LOOK_SECONDS)
        return
    try:
        _local(remote)
    except OmnidraftError as error:  # the pages show what was fetched before
        typer.secho(f"omnidraft: {error}", err=True, fg="red")


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
