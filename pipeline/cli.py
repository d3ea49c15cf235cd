"""The command line. Heavy libraries are imported inside commands, so that `--help` is quick."""

import sys

import typer

from pipeline.cli_bench import bench
from pipeline.cli_bench_plan import bench_plan
from pipeline.cli_bench_scale import bench_scale
from pipeline.cli_bench_serve import bench_serve
from pipeline.cli_bench_store import bench_store
from pipeline.cli_dashboard import dashboard
from pipeline.cli_log import check, compact, sql
from pipeline.cli_plan import plan
from pipeline.cli_replay import replay
from pipeline.cli_serve import serve
from pipeline.cli_study import study
from pipeline.cli_ui import ui
from pipeline.cli_versions import versions_group
from pipeline.cli_vocab import bench_translate, vocab
from pipeline.cli_zoo import pad, zoo
from store.errors import OmnidraftError, UsageError

app = typer.Typer(
    name="omnidraft",
    help="Speculative decoding across vocabularies with a drafter that learns while the stream runs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(replay)
app.command()(serve)
app.command()(bench)
app.command()(study)
app.command()(vocab)
app.command()(bench_translate)
app.command()(bench_scale)
app.command()(bench_store)
app.command()(bench_serve)
app.command()(bench_plan)
app.command()(plan)
app.command()(sql)
app.command()(check)
app.command()(compact)
app.command()(dashboard)
app.add_typer(versions_group, name="versions")
app.command()(ui)
app.command()(pad)
app.add_typer(zoo, name="zoo")


def main() -> None:
    """Run the command line; an error made by us is one message and no traceback. `bench store` is `bench-store`."""
    if sys.argv[1:2] == ["bench"] and sys.argv[2:3] in (["plan"], ["scale"], ["serve"], ["store"], ["translate"]):
        sys.argv[1:3] = [f"bench-{sys.argv[2]}"]
    if "--ray" in sys.argv:  # its address may be left out
        place = sys.argv.index("--ray")
        if not sys.argv[place + 1 : place + 2] or sys.argv[place + 1].startswith("-"):
            sys.argv.insert(place + 1, "local")
    try:
        app()
    except UsageError as error:
        typer.secho(f"omnidraft: {error}", err=True, fg="red")
        sys.exit(2)
    except OmnidraftError as error:
        typer.secho(f"omnidraft: {error}", err=True, fg="red")
        sys.exit(1)
