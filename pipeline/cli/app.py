"""The command line. Heavy libraries are imported inside commands, so that `--help` is quick."""

import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typing_extensions import override

from pipeline.cli.bench import bench
from pipeline.cli.config import config
from pipeline.cli.help import add_help, order_commands
from pipeline.cli.log import check, compact, sql
from pipeline.cli.memory import memory
from pipeline.cli.models import vocab, zoo
from pipeline.cli.pages import dashboard, plot
from pipeline.cli.run import RayAlone, replay, serve
from pipeline.cli.train import train
from pipeline.cli.versions import versions_group
from pipeline.config.cli_options import PlainGroup
from pipeline.reports.log_output import LogLevel, write_log
from pipeline.reports.machine import find_own_version
from store.errors import OmnidraftError, UsageError

LOG = logging.getLogger("omnidraft.cli")


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
    try:
        app()
    except OmnidraftError as error:
        typer.secho(f"omnidraft: {error}", err=True, fg="red")
        sys.exit(_status_of(error))


if __name__ == "__main__":
    main()
