"""Pictures and pages of what a run left behind. The dashboards read files, and nothing here imports them: each is drawn
by a process of its own.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LONGEST = 120.0  # seconds that a picture may take


def draw(module: str, *arguments: str) -> str | None:
    """Run a module of `dashboards` as a command.

    Returns:
        why it failed, or None.
    """
    command = [sys.executable, "-m", f"dashboards.{module}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return f"it took more than {LONGEST:.0f} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def of_run(run_folder: Path) -> Sequence[Path]:
    """The run's acceptance curve with its marks, and some completions token by token; those that could be drawn."""
    wanted = {"curve": run_folder / "acceptance.png", "token_view": run_folder / "tokens.html"}
    return [file for module, file in wanted.items() if draw(module, str(run_folder), str(file)) is None]
