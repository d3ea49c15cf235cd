"""Benchmarks are tested by one smoke test; all else is marked sweep, unless it is named on the command line."""

from pathlib import Path

import pytest

HERE, SMOKE = Path(__file__).parent, "test_smoke.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("tests/benchmarks" in argument for argument in config.args):
        return
    for item in items:
        if HERE in item.path.parents and item.path.name != SMOKE:
            item.add_marker(pytest.mark.sweep)
