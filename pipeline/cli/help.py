"""The help of all commands: their groups, examples for each, and no types of options without a value.

`add_help` is called once, when all commands are registered; no command names its own group or examples.
"""

from collections.abc import Mapping

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
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "": ("omnidraft replay", "omnidraft dashboard", "omnidraft sql --recipe acceptance-over-time"),
    "replay": (
        "omnidraft replay",
        "omnidraft replay questions.jsonl --target smollm2-135m --temperature 0.7",
        "omnidraft replay data.parquet --where split=test --limit 500 --batch 8",
        "omnidraft replay --resume last",
    ),
    "serve": (
        "omnidraft serve --target smollm2-135m",
        "omnidraft serve --port 8080 --learn shadow",
        "omnidraft serve --resume last",
    ),
    "train": (
        "omnidraft train --from-log runs/first",
        "omnidraft train --from-log runs/monday runs/tuesday --target smollm2-135m --passes 4",
    ),
    "dashboard": (
        "omnidraft dashboard",
        "omnidraft dashboard --run runs/first --port 0",
        "omnidraft dashboard --mlflow",
    ),
    "sql": (
        "omnidraft sql",
        "omnidraft sql --recipe acceptance-over-time",
        'omnidraft sql "SELECT outcome, count(*) FROM decisions GROUP BY outcome"',
        'omnidraft sql "FROM decisions LIMIT 2" --format vertical',
    ),
    "check": ("omnidraft check", "omnidraft check --run runs/first --json"),
    "plot": (
        "omnidraft plot curve",
        "omnidraft plot tokens runs/first --output tokens.html",
    ),
    "memory": ("omnidraft memory show runs/first --top 20", "omnidraft memory forget runs/first --prompt 17"),
    "memory show": ("omnidraft memory show runs/first --top 20",),
    "memory forget": ("omnidraft memory forget runs/first --prompt 17",),
    "versions": ("omnidraft versions", "omnidraft versions compare baseline candidate"),
    "versions show": ("omnidraft versions show 7",),
    "versions promote": ("omnidraft versions promote 7",),
    "versions rollback": ("omnidraft versions rollback",),
    "versions sync": ("omnidraft versions sync", "omnidraft versions sync --keep 5 --dry-run"),
    "versions compare": (
        "omnidraft versions compare baseline candidate",
        "omnidraft versions compare 7 3 --probe questions.jsonl --json differences.json",
    ),
    "versions export": ("omnidraft versions export 7 drafter-7",),
    "bench": ("omnidraft bench questions.jsonl --target smollm2-135m", "omnidraft bench --limit 16 --temperature 0.7"),
    "vocab": (
        "omnidraft vocab builtin:target-12m builtin:drafter-1.6m",
        "omnidraft vocab Qwen/Qwen2.5-7B-Instruct JackFram/llama-68m --json",
    ),
    "zoo": ("omnidraft zoo", "omnidraft zoo smollm2-135m"),
    "config": (
        "omnidraft config",
        "omnidraft config --config settings.toml --set learn.rate=0.0001 --changed",
        "omnidraft config --sample settings.toml",
    ),
    "compact": ("omnidraft compact --dry-run", "omnidraft compact --run runs/first"),
}


def order_commands(names: list[str]) -> list[str]:
    """Sort the names of commands as in `GROUPS`; others follow."""
    known = [name for group in GROUPS.values() for name in group]
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def add_help(app: typer.Typer, words: str = "") -> None:
    """Give every command of an app its group and its examples.

    Args:
        app: the app, with all its commands.
        words: the words that call it, after `omnidraft`.
    """
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
