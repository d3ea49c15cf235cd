"""The examples in docstrings are correct, and the modules that are hard to read without one have one."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipeline", "stages", "store", "dashboards")

# Modules that are hard to read without a worked example.
EXPECTED = (
    "pipeline.config.settings",
    "stages.verification.chain_decisions",
    "stages.contract.snapshot",
    "stages.decode",
    "stages.drafting.costs",
    "stages.drafting.stopping",
    "stages.learn.examples.teacher",
    "stages.ngrams.trie",
    "stages.verification.rules",
    "stages.verification.parsing",
    "stages.verification.tree_decisions",
)


def has_example(path: Path) -> bool:
    return ">>> " in path.read_text(encoding="utf-8")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = sorted(
    module_name(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py") if has_example(path)
)


@pytest.mark.parametrize("name", sorted({*MODULES, *EXPECTED}))
def test_examples_in_docstrings_hold(name: str):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.attempted > 0, f"{name} must have an example in a docstring: lines that begin with >>>"
    assert result.failed == 0, "the differences are in the captured output"
