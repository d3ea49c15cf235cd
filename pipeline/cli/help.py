"""The help of all commands: their groups, examples for each, and no types of options without a value.

`add_help` is called once, when all commands are registered; no command names its own group or examples.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import typer
from typer.core import TyperCommand
from typer.main import get_command_name

from pipeline.config.cli_options import PlainCommand

# The commands by group, in the order in which the help lists them.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Run": ("replay", "serve", "train"),
    "Look at runs": ("dashboard", "sql", "check", "plot", "memory"),
    "Versions": ("versions",),
    "Measure": ("bench",),
    "Tools": ("vocab", "zoo", "config", "compact"),
}
# By the words of a command.
EXAMPLES: Mapping[str, list[str]] = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))


def order_commands(names: list[str]) -> list[str]:
    """Sort the names of commands as in `GROUPS`; others follow."""
    known = [name for group in GROUPS.values() for name in group]
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def add_help(app: typer.Typer, words: str = "") -> None:
    """Give every command of an app its group and its examples. `words` call the app, after `omnidraft`."""
    if not words:
        app.info.epilog = _format_examples("")
    for command in app.registered_commands:
        called = command.name or get_command_name(getattr(command.callback, "__name__", ""))
        name = f"{words} {called}".strip()
        command.rich_help_panel = None if words else _group_of(name)
        command.epilog = _format_examples(name)
        if command.cls in (None, TyperCommand):
            command.cls = PlainCommand
    for group in app.registered_groups:
        if group.typer_instance is None or not isinstance(group.name, str):
            continue
        group.rich_help_panel = _group_of(group.name)
        group.epilog = _format_examples(group.name)
        add_help(group.typer_instance, group.name)


def _group_of(name: str) -> str | None:
    return next((title for title, names in GROUPS.items() if name in names), None)


def _format_examples(name: str) -> str:
    examples = EXAMPLES.get(name, ())
    if not examples:
        return ""
    return "\n".join(["Examples:" if examples[1:] else "Example:", "", *(f"- `{one}`" for one in examples)])
