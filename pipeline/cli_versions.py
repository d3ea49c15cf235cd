"""`omnidraft versions`: what MLflow holds, and which version is in service; without torch."""

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pipeline.cli_registry import (
    MODEL,
    Format,
    FormatOption,
    NameOption,
    Number,
    RunsOption,
    UriOption,
    new_folder,
    print_table,
    printable,
    store_of,
)
from pipeline.cli_versions_work import compare, export

if TYPE_CHECKING:
    from store.versions import RegisteredVersion, VersionDetails

RUNS = Path("runs")
KEPT = 10  # newest versions that prune leaves by default
_HEADS = ("number", "run", "offset", "reason", "parent", "acceptance", "probe", "cache", "aliases", "published (UTC)")


class _ListByDefault(TyperGroup):
    """`omnidraft versions` alone lists."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


versions_group = typer.Typer(cls=_ListByDefault, help="Published drafters: list, compare, put into service, export.")


@versions_group.command("list")
def list_(
    mlflow_uri: UriOption = None, runs: RunsOption = RUNS, name: NameOption = MODEL, output: FormatOption = Format.TABLE
) -> None:
    """List the published drafters, the newest first."""
    from store.registry import list_versions

    found = list_versions(store_of(mlflow_uri, runs), name)
    if output is Format.JSON:
        print(json.dumps([asdict(version) for version in found], default=str, indent=2))
    elif found:
        print_table(_HEADS, map(_row, found))
    else:
        print(f"{name} has no version yet; `omnidraft replay` publishes some")


@versions_group.command()
def show(
    number: Number,
    mlflow_uri: UriOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = MODEL,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show where a version came from, its figures and how to use it."""
    from store.registry import show_version

    details = show_version(store_of(mlflow_uri, runs), name, number)
    if output is Format.JSON:
        print(json.dumps(asdict(details), default=str, indent=2))
    else:
        _print_details(details, name)


@versions_group.command()
def promote(number: Number, mlflow_uri: UriOption = None, runs: RunsOption = RUNS, name: NameOption = MODEL) -> None:
    """Make a version the champion: the one that `models:/NAME@champion` means."""
    from store.version_shelf import promote as put_forward

    before = put_forward(store_of(mlflow_uri, runs), name, number)
    print(f"champion: version {number}{_instead(before, number)}")
    _tell_use(name, "@champion")


@versions_group.command()
def rollback(mlflow_uri: UriOption = None, runs: RunsOption = RUNS, name: NameOption = MODEL) -> None:
    """Make the champion before the present one the champion again."""
    from store.version_shelf import rollback as step_back

    lost, found = step_back(store_of(mlflow_uri, runs), name)
    print(f"champion: version {found} again, instead of version {lost}")
    _tell_use(name, "@champion")


@versions_group.command()
def recall(
    number: Number,
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Keep the checked files here.", show_default=False)
    ] = None,
    mlflow_uri: UriOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = MODEL,
) -> None:
    """Bring any version back into service: fetch it, check every file, and only then make it the champion.

    With DIR, a new or empty folder, what was checked stays there, ready for `--drafter DIR`.
    """
    from store.registry import fetch_version
    from store.version_shelf import promote as put_forward

    uri = store_of(mlflow_uri, runs)
    with TemporaryDirectory() as scratch, new_folder(folder or Path(scratch) / "version") as free:
        fetch_version(f"models:/{name}/{number}", uri, free)
    before = put_forward(uri, name, number)
    print(f"champion: version {number}, every file as it was published{_instead(before, number)}")
    if folder:
        print(f"its files: {folder}")
    _tell_use(name, "@champion")


@versions_group.command()
def prune(
    keep: Annotated[int, typer.Option("--keep", help="Newest versions that stay.", min=0)] = KEPT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    mlflow_uri: UriOption = None,
    runs: RunsOption = RUNS,
    name: NameOption = MODEL,
) -> None:
    """Delete versions from MLflow, but for champion, candidate, their lineage and the newest ones.

    Runs keep their own folders of versions.
    """
    from store.version_shelf import prune as clear

    gone = clear(store_of(mlflow_uri, runs), name, keep, dry_run)
    if gone:
        print(
            f"{'would delete' if dry_run else 'deleted'} version{'s' if gone[1:] else ''} {', '.join(map(str, gone))}"
        )
    else:
        print("nothing to delete: every version is in use, in the lineage of one that is, or among the newest")


versions_group.command()(compare)
versions_group.command()(export)


def _instead(before: int | None, number: int) -> str:
    return "" if before in (None, number) else f"; instead of version {before}"


def _tell_use(name: str, which: str) -> None:
    print(f"use it: omnidraft replay --drafter models:/{name}{which}")


def _row(version: "RegisteredVersion") -> list[str]:
    aliases, when = ", ".join(version.aliases), f"{version.created_at:%Y-%m-%d %H:%M}"
    told = (version.number, version.run, version.offset, version.reason, version.parent)
    rates = (None if rate is None else f"{rate:.3f}" for rate in (version.acceptance, version.probe))
    return [printable(value) for value in (*told, *rates, version.cache_entries, aliases, when)]


def _print_details(details: "VersionDetails", name: str) -> None:
    manifest = details.manifest
    files = {file: f"sha256 {digest[:16]}…" for file, digest in manifest["files"].items()}
    plain = {key: value for key, value in manifest.items() if key not in ("files", "counters")}
    for title, values in (
        ("manifest", plain),
        ("counters", manifest["counters"]),
        ("files", files),
        ("metrics", details.metrics),
        ("settings", details.params),
        ("tags", {**details.tags, "aliases": ", ".join(details.summary.aliases)}),
    ):
        print_table((title, ""), ((key, printable(value)) for key, value in sorted(values.items())))
    _tell_use(name, f"/{details.summary.number}")
