"""Documentation is executed: SQL blocks run, command lines parse, settings files load, links lead somewhere."""

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

from pipeline.cli import app
from pipeline.config import load
from store.log import RunLog
from store.queries import LogReader

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def fenced(language: str) -> list[tuple[str, str]]:
    """(page, content) of all fenced blocks of a language."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [(page.name, block) for page in PAGES for block in pattern.findall(page.read_text())]


def command_lines() -> list[tuple[str, str]]:
    """(page, command) of every `omnidraft` line in shell and indented blocks, continuation lines joined."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?: {4})?(?:pip install \S+ && )?(omnidraft [^\n]*)", text, re.MULTILINE):
            found.append((page.name, re.split(r"\s{3,}|\s#", line)[0].strip()))
    return found


@pytest.mark.parametrize(("page", "query"), fenced("sql"))
def test_queries_run(tmp_path: Path, page: str, query: str):
    with RunLog(tmp_path / "run"):
        pass
    with LogReader([tmp_path / "run"]) as log:
        log.select(query)


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_command_lines_parse(page: str, line: str):
    words = shlex.split(line)[1:]
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("omnidraft", words)


def test_there_are_commands_to_test():
    assert len(command_lines()) > 15


@pytest.mark.parametrize(("page", "settings"), fenced("toml"))
def test_settings_files_load(tmp_path: Path, page: str, settings: str):
    (tmp_path / "settings.toml").write_text(settings)
    load(tmp_path / "settings.toml")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("path", sorted([*ROOT.glob("s*/*.py"), *ROOT.glob("pipeline/*.py")]), ids=lambda p: p.stem)
def test_docstring_examples_hold(path: Path):
    if ">>>" in path.read_text():
        module = importlib.import_module(f"{path.parent.name}.{path.stem}")
        assert doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL).failed == 0
