"""The API key of a server stays in its own process."""

import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli import run as run_commands


def test_processes_that_the_server_starts_do_not_inherit_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}

    def record(*given: Any, **_: Any) -> None:
        seen["key"], seen["inherited"] = given[-1], os.environ.get("OMNIDRAFT_API_KEY")

    monkeypatch.setattr(run_commands, "_serve", record)
    monkeypatch.setenv("OMNIDRAFT_API_KEY", "secret")
    app = typer.Typer()
    app.command()(run_commands.serve)
    result = CliRunner().invoke(app, ["--run", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert seen == {"key": "secret", "inherited": None}
