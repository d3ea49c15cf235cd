"""The benchmark's end of an engine's process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.vllm.engine import EngineSpec, RoundRequest, RoundResult
from store.errors import UsageError

LAST_LINES = 20  # of an engine's messages, that an error names


class EngineWorker:
    """An engine in a process of its own. A context manager, at whose end the process ends.

    Args:
        spec: the engine.
        environment: variables in addition to those of this process.
        messages: file for what the engine writes.
        python: interpreter of an environment with vLLM.
    """

    def __init__(
        self, spec: EngineSpec, environment: Mapping[str, str], messages: Path, python: str = sys.executable
    ) -> None:
        self._messages = messages
        with messages.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.vllm.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | environment,
            )
        self._send(asdict(spec))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """Id of the engine's process."""
        return self._process.pid

    def wait_until_ready(self) -> bool:
        """Wait for the engine. Returns whether vLLM took its second model runner.

        Raises:
            UsageError: it does not start.
        """
        return bool(self._receive()["second_runner"])

    def complete(self, request: RoundRequest) -> RoundResult:
        """Complete a round.

        Raises:
            UsageError: the engine ended.
        """
        self._send(asdict(request))
        return RoundResult.from_json(self._receive())

    def close(self) -> None:
        """End the process and wait for its end."""
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()

    def _send(self, values: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(values) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._make_error() from None

    def _receive(self) -> Mapping[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._make_error()
        found: Mapping[str, object] = json.loads(line)
        return found

    def _make_error(self) -> UsageError:
        self._process.wait()
        lines = self._messages.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return UsageError(f"The engine ended with exit status {self._process.returncode}:\n" + "\n".join(lines))
