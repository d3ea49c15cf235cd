"""llama.cpp's server as a process: a program that does not run is refused, and a started one is stopped."""

import sys
from pathlib import Path

import pytest

from pipeline.bench.engines import llamacpp as bench_engine_llamacpp
from pipeline.bench.engines.llamacpp import SERVER, LlamaCppServer, find_llama_cpp
from store.errors import UsageError


@pytest.fixture(autouse=True)
def with_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine_llamacpp, "find_spec", lambda name: name)


def program(folder: Path, content: bytes) -> Path:
    """Write a program at the path of the server."""
    server = folder / SERVER
    server.write_bytes(content)
    server.chmod(0o755)
    return server


def test_a_program_that_does_not_run_is_refused(tmp_path: Path):
    server = program(tmp_path, b"\x7fELF of another machine")
    with pytest.raises(UsageError, match="must print its version"):
        find_llama_cpp(tmp_path)
    with pytest.raises(UsageError, match="server must start"):
        LlamaCppServer([str(server)], tmp_path / "server.log")


def test_a_program_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_engine_llamacpp, "VERSION_SECONDS", 0.2)
    program(tmp_path, b"#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(UsageError, match="must print its version"):
        find_llama_cpp(tmp_path)


def test_an_interrupt_while_it_loads_stops_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[LlamaCppServer] = []

    def interrupt(server: LlamaCppServer) -> None:
        started.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaCppServer, "_await_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        LlamaCppServer([sys.executable, "-c", "__import__('time').sleep(600)"], tmp_path / "server.log")
    assert started[0]._process.poll() is not None
