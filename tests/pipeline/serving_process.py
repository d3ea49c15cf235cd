"""`omnidraft serve` in a process of its own, spoken to over HTTP."""

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

from replaying import QUICK
from serving_tiny import PATIENCE, until
from tiny_pair import TinyPair

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from pipeline.cli import main; main()"


class ServerLife:
    """One process of the command, from its start to its end."""

    def __init__(self, folder: Path, *words: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("err-*")))
        self._err = folder / f"err-{number}"
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "serve", *map(str, words)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )

    @property
    def err(self) -> str:
        """What it told so far."""
        return self._err.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        until(lambda: self.process.poll() is not None or "serving " in self.err, "it does not begin to serve")
        assert self.process.poll() is None, self.err
        found = re.search(r"on (http://\S+)/v1", self.err)
        assert found, self.err
        return found[1]

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """One completion."""
        asked = {"model": "any", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def model(self) -> str:
        """The only model's name."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=PATIENCE) as answer:
            (model,) = json.loads(answer.read())["data"]
        return str(model["id"])

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Its exit status, after a signal."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextmanager
def server_life(folder: Path, *words: object) -> Iterator[ServerLife]:
    """A process that is not left behind."""
    life = ServerLife(folder, *words)
    try:
        yield life
    finally:
        if life.process.poll() is None:
            life.process.kill()
            life.process.wait(PATIENCE)


def server_words(pair: TinyPair, run: Path, *more: object, **changes: object) -> list[object]:
    """What is typed to begin a run on a free port; `section__key` stands for `section.key`."""
    settings = {**QUICK, **{key.replace("__", "."): value for key, value in changes.items()}}
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return [*pair.options, "--port", 0, "--device", "cpu", "--no-publish", *chosen, *more, "--run", run]
