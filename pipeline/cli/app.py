"""The command line. Heavy libraries are imported inside commands, so that `--help` is quick."""

import atexit
import gc
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command_name
from typing_extensions import override

from pipeline.cli.bench import bench
from pipeline.cli.config import config
from pipeline.cli.log import check, compact, sql
from pipeline.cli.memory import memory
from pipeline.cli.models import vocab, zoo
from pipeline.cli.pages import dashboard, plot
from pipeline.cli.run import RayAlone, replay, serve
from pipeline.cli.train import train
from pipeline.cli.versions import versions_group
from pipeline.config.cli_options import PlainCommand, PlainGroup
from pipeline.reports.log_output import LogLevel, write_log
from pipeline.reports.machine import find_own_version
from store.errors import OmnidraftError, UsageError

LOG = logging.getLogger("omnidraft.cli")


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


class Commands(PlainGroup):
    """All commands; options set how messages are logged."""

    @override
    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for one in params:  # typer's own texts take five lines
            if one.name == "install_completion":
                one.help = "Complete commands in this shell."
            elif one.name == "show_completion":
                one.hidden = True
        return params

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return order_commands(super().list_commands(ctx))

    @override
    def invoke(self, ctx: Any) -> Any:
        as_json = ctx.params["log_json"]
        level = LogLevel.DEBUG if ctx.params["verbose"] else LogLevel(ctx.params["log_level"])
        with write_log(level, as_json=as_json):
            try:
                return super().invoke(ctx)
            except OmnidraftError as error:
                if not as_json:
                    raise
                LOG.error("%s", error)
                sys.exit(_status_of(error))


app = typer.Typer(
    cls=Commands,
    name="omnidraft",
    help="Speculative decoding across vocabularies with a drafter that learns while the stream runs.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    print(f"omnidraft {find_own_version()}")
    raise typer.Exit


@app.callback()
def log_options(
    log_level: Annotated[
        LogLevel, typer.Option(help="Lowest level of the log.", case_sensitive=False, metavar="LEVEL")
    ] = LogLevel.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as one JSON object a line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="As --log-level debug.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options before a command's name. `Commands.invoke` reads them."""


app.command(cls=RayAlone)(replay)
COMMANDS: tuple[Callable[..., None], ...] = (
    *(serve, train, bench, vocab),
    *(sql, check, plot, compact, dashboard, config, zoo),
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(versions_group, name="versions")
app.add_typer(memory, name="memory", cls=PlainGroup)
add_help(app)


def _status_of(error: OmnidraftError) -> int:
    """2 for a wrong use, 1 for any other error of ours."""
    return 2 if isinstance(error, UsageError) else 1


def main() -> None:
    """Run the command line; an error made by us is one message and no traceback."""
    atexit.register(gc.freeze)  # at its end Python collects garbage among all libraries: 5 to 7 s of processor time
    try:
        app()
    except OmnidraftError as error:
        typer.secho(f"omnidraft: {error}", err=True, fg="red")
        sys.exit(_status_of(error))


if __name__ == "__main__":
    main()
