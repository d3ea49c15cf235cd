"""Plots and pages of a finished run. The dashboards read files, and nothing here imports them: each is drawn
in its own process.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

TIMEOUT = 120.0  # of drawing a plot, in seconds
# Modules that the pipeline starts; users may start others.
Module = Literal["curve", "serve", "token_view"]


def command_of(module: Module, *arguments: str) -> list[str]:
    """Return the command that runs a module of `dashboards`. Only this function names them: no import would fail."""
    return [sys.executable, "-m", f"dashboards.{module}", *arguments]


def draw(module: Module, *arguments: str) -> str | None:
    """Run a module of `dashboards` to its end. Returns the reason of a failure, or None."""
    command = command_of(module, *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"it took more than {TIMEOUT:.0f} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def draw_run_plots(run_folder: Path) -> Sequence[Path]:
    """Draw the run's acceptance curve and some completions token by token. Returns the files that were drawn."""
    wanted: dict[Module, Path] = {"curve": run_folder / "acceptance.png", "token_view": run_folder / "tokens.html"}
    return [file for module, file in wanted.items() if draw(module, str(run_folder), str(file)) is None]
