"""Plots are drawn in their own processes; a failure is reported and stops nothing."""

import importlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from pipeline.cli import pages
from pipeline.reports.artifacts import Module, command_of, draw_run_plots
from store.log.run_log import RunLog

STARTED: dict[Module, list[tuple[Any, ...]]] = {
    "curve": [(draw_run_plots, Path("a"))],
    "token_view": [(draw_run_plots, Path("a"))],
    "serve": [
        (pages.dashboard, run, runs, port, host)
        for run, runs, port, host in [
            (None, Path("runs"), 8050, None),
            (Path("runs/a"), Path("runs"), 0, "0.0.0.0"),
            (None, Path("others"), 80, "::1"),
        ]
    ],
}


def test_a_run_has_its_curve_and_its_tokens_even_without_a_prompt(tmp_path: Path):
    with RunLog(tmp_path):
        pass
    assert [file.name for file in draw_run_plots(tmp_path) if file.is_file()] == ["acceptance.png", "tokens.html"]


@pytest.mark.parametrize("module", get_args(Module))
def test_a_module_that_is_started_by_name_takes_what_it_is_given(module: Module, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    def record(command: list[str], *_: Any, **__: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    @contextmanager
    def run_server(command: list[str]) -> Iterator[Any]:
        yield SimpleNamespace(wait=lambda: record(command).returncode)

    monkeypatch.setattr(subprocess, "run", record)
    monkeypatch.setattr(pages, "_server", run_server)
    for start, *arguments in STARTED[module]:
        start(*arguments)
    given = [command[3:] for command in commands if command[:3] == command_of(module)]
    assert len(given) == len(STARTED[module])
    found = importlib.import_module(f"dashboards.{module}")
    for words in given:
        known = vars(found.PARSER.parse_args(words))  # ends the process at an unknown argument
        accepted = {str(value) for value in known.values()}
        assert {word for word in words if not word.startswith("--")} <= accepted
