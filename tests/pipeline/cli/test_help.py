"""The help of all commands: groups, examples that parse, no types of options without a value, completion, version."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli.app import EXAMPLES, GROUPS, app

ROOT = typer.main.get_command(app)


def leaves(command: Any = ROOT, words: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by the words that call it."""
    for name, below in getattr(command, "commands", {}).items():
        found = f"{words} {name}".strip()
        yield from leaves(below, found) if hasattr(below, "commands") else [(found, below)]


NAMES = [name for name, _ in leaves()]


def help_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_help_fits_on_a_screen():
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert len(done.output.splitlines()) <= 50


def test_every_command_is_in_a_group():
    names = sorted({name.split()[0] for name in NAMES})
    assert sorted(name for group in GROUPS.values() for name in group) == names
    shown = help_of()
    places = [shown.index(f" {title} ") for title in GROUPS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_an_example_that_parses(name: str):
    command = dict(leaves())[name]
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        words = shlex.split(example)
        assert words[: 1 + len(name.split())] == ["omnidraft", *name.split()]
        command.make_context("omnidraft", words[1 + len(name.split()) :])


def test_every_command_that_reports_can_do_so_in_json():
    texts = {"serve", "dashboard", "plot"}
    actions = {*(f"versions {name}" for name in ("promote", "rollback", "export"))}
    without = {name for name, command in leaves() if not any("--json" in one.opts for one in command.params)}
    assert without == texts | actions


@pytest.mark.parametrize("name", ["replay", "serve"])
def test_options_are_in_the_groups_of_their_settings(name: str):
    shown = help_of(name)
    for group, option in (("Models", "--drafter"), ("Sampling", "--temperature"), ("Settings", "--config")):
        panel = shown.partition(f" {group} ")[2].partition("╰")[0]
        assert option in panel
    assert len(shown.partition(" Options ")[2].partition("╰")[0].splitlines()) < 10


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("omnidraft repl", {"replay"}),
        ("omnidraft replay --weights cod", {"codes", "codes8"}),
        ("omnidraft replay --set learn.ra", {"learn.rate="}),
        ("omnidraft sql --recipe acceptance-o", {"acceptance-over-time"}),
    ],
)
def test_the_shell_completes_commands_choices_and_settings(typed: str, wanted: set[str]):
    words = typed.split()
    environment = {"_OMNIDRAFT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(app, prog_name="omnidraft", env=environment)
    assert set(done.output.split()) == wanted
