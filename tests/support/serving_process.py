"""`omnidraft serve` in a process of its own, with an HTTP client."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import warm_python
from replaying import QUICK
from serving_tiny import HANG_SECONDS, wait_until
from tiny_pair import TinyPair

PROGRAM = "from pipeline.cli.app import main; main()"


class ServerProcess:
    """A process of the command."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("err-*")))
        self._err = folder / f"err-{number}"
        with self._err.open("wb") as err:
            self.process = warm_python.Popen(
                [sys.executable, "-c", PROGRAM, "serve", *map(str, arguments)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=os.environ | {warm_python.NESTED: "1"},
            )

    @property
    def err(self) -> str:
        """The standard error output so far."""
        return self._err.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        """Address of the server; waits until it listens."""
        wait_until(lambda: self.process.poll() is not None or "serving " in self.err, "it does not begin to serve")
        assert self.process.poll() is None, self.err
        found = re.search(r"on (http://\S+)/v1", self.err)
        assert found, self.err
        return found[1]

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """Request a completion and return the response."""
        body = {"model": "any", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
            return json.loads(answer.read())

    def model(self) -> str:
        """Return the name of the only model."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=HANG_SECONDS) as answer:
            (model,) = json.loads(answer.read())["data"]
        return str(model["id"])

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(HANG_SECONDS)


@contextmanager
def server_process(folder: Path, *arguments: object) -> Iterator[ServerProcess]:
    """Run a process, and kill it after the block."""
    server = ServerProcess(folder, *arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(HANG_SECONDS)


def server_arguments(pair: TinyPair, run: Path, *more: object, **changes: object) -> list[object]:
    """Arguments that start a run on a free port; `section__key` is `section.key`."""
    settings = {**QUICK, **{key.replace("__", "."): value for key, value in changes.items()}}
    chosen = [argument for key, value in settings.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
    return [*pair.options, "--port", 0, "--device", "cpu", "--no-publish", *chosen, *more, "--run", run]
