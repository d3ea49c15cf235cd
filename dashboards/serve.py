"""Serves the dashboards: `python -m dashboards.serve [--run DIR | --runs DIR]`; `omnidraft dashboard` runs it."""

import sys
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path

from dashboards.commands import run_command
from store.errors import UsageError
from store.hosts import is_loopback, listen
from store.log.manifest import read_manifest
from store.log_records import limit_warnings

HOST, PORT = "127.0.0.1", 8050  # the pages have no password, so no other machine may see them


def url_of(host: str, port: int) -> str:
    """URL at which a browser on this machine opens the pages."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"


def serve(run: Path | None, runs: Path, host: str, port: int) -> None:
    """Serve the dashboards of one run or of a folder of runs until Ctrl-C."""
    try:
        import uvicorn

        from dashboards.web.app import create_app
    except ImportError as error:
        message = f"the dashboards need {error.name}, which is not installed; install omnidraft again"
        raise UsageError(message) from error
    folder = run or runs
    if not folder.is_dir():
        raise UsageError(f"{'--run' if run else '--runs'} must name an existing folder, got '{folder}'")
    if run:
        read_manifest(run)
    listener = listen(host, port)
    port = listener.getsockname()[1]
    if not is_loopback(host):
        warning = "anyone who can reach this machine can read all prompts and texts without a password"
        print(f"warning: listening on {host}: {warning}", file=sys.stderr, flush=True)
    print(f"dashboards over {folder}: {url_of(host, port)} (Ctrl-C ends them)", flush=True)
    config = uvicorn.Config(create_app(run, runs, host), log_level="warning", server_header=False)
    limit_warnings("uvicorn.error")
    uvicorn.Server(config).run(sockets=[listener])


PARSER = ArgumentParser(description="Serve the dashboards.")
PARSER.add_argument("--run", type=Path, help="folder of one run")
PARSER.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default %(default)s)")
PARSER.add_argument("--host", default=HOST, help="address to listen on (default %(default)s)")
PARSER.add_argument(
    "--port", type=int, default=PORT, help="port to listen on; 0 takes a free one (default %(default)s)"
)

if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        run_command(PARSER, lambda args: serve(args.run, args.runs, args.host, args.port), misuse=2)
