"""`omnidraft versions`: what MLflow holds, which version is in service, and what the versions are worth.

Torch is loaded only when `compare` or `export` really starts.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from pipeline.config.cli_options import (
    RUNS_VARIABLE,
    PlainGroup,
    PrintJsonOption,
    option,
    overrides_of,
    parse_settings,
    set_option,
)
from pipeline.reports.terminal import print_table, require_file, stderr_console, to_printable
from store.errors import OmnidraftError, UsageError

if TYPE_CHECKING:
    from pipeline.versions.compare import Comparison
    from store.registry.registered_version import RegisteredVersion, VersionDetails

RUNS = Path("runs")
LIMIT = 64  # prompts of a probe that is named
STANDARD_OUTPUT = Path("-")
_HEADS = ("number", "aliases", "run/version", "probe", "tokens/s", "reason", "offset", "parent", "published (UTC)")


_ABOUT_VERSION = "A number of the list, or an alias such as champion."
Version = Annotated[str, typer.Argument(metavar="N", help=_ABOUT_VERSION, show_default=False)]
OptionalVersion = Annotated[str | None, typer.Argument(metavar="[N]", help=_ABOUT_VERSION, show_default=False)]
UriOption = Annotated[str | None, typer.Option("--mlflow-uri", help="Another MLflow store or server.")]
StoreRunsOption = Annotated[
    Path, typer.Option("--runs", envvar=RUNS_VARIABLE, help="A folder of runs; its mlflow.db is the store.")
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name", help="The registered model, one for each pair of target and drafter. [default: the only one]"
    ),
]


def store_of(mlflow_uri: str | None, runs: Path) -> str:
    """The URI of the store that the options name."""
    from store.registry.registry import default_uri

    return mlflow_uri or default_uri(runs)


def choose_model(uri: str, name: str | None) -> str:
    """The registered model that the options name, or the only one. Raises UsageError if there are several."""
    from store.registry.registry import find_only_model

    return name or find_only_model(uri)


def _choose_version(uri: str, name: str | None, text: str) -> tuple[str, int]:
    """The registered model and the number of a version that is named by its number or an alias."""
    from store.registry.registry import resolve_number

    name = choose_model(uri, name)
    return name, resolve_number(uri, name, text)


class _ShowByDefault(PlainGroup):
    """`omnidraft versions` alone lists."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


versions_group = typer.Typer(cls=_ShowByDefault, help="Published drafters: list, compare, put into service, export.")


@versions_group.command()
def show(
    number: OptionalVersion = None,
    mlflow_uri: UriOption = None,
    runs: StoreRunsOption = RUNS,
    name: NameOption = None,
    as_json: PrintJsonOption = False,
) -> None:
    """List the published drafters, the newest first; of one, show its origin, its metrics and how to use it."""
    from store.registry.registry import list_versions, show_version

    uri = store_of(mlflow_uri, runs)
    if number is not None:
        name, chosen = _choose_version(uri, name, number)
        details = show_version(uri, name, chosen)
        if as_json:
            print(json.dumps(asdict(details), default=str, indent=2))
        else:
            _print_details(details, name)
        return
    found = list_versions(uri, name)
    if as_json:
        print(json.dumps([asdict(version) for version in found], default=str, indent=2))
    elif not found:
        print(f"{name or 'the registry'} has no version yet; `omnidraft replay` publishes some")
    else:
        for model, versions in groupby(found, attrgetter("name")):
            _print_versions(model, list(versions))


@versions_group.command()
def promote(
    number: Version,
    mlflow_uri: UriOption = None,
    runs: StoreRunsOption = RUNS,
    name: NameOption = None,
) -> None:
    """Make a version the champion, the one that `models:/NAME@champion` means, after every file was checked."""
    from store.registry.registry import fetch_version
    from store.registry.retention import promote as put_forward

    name, chosen = _choose_version(uri := store_of(mlflow_uri, runs), name, number)
    with TemporaryDirectory() as scratch:
        fetch_version(f"models:/{name}/{chosen}", uri, Path(scratch) / "version")
    before = put_forward(uri, name, chosen)
    instead = "" if before in (None, chosen) else f"; instead of #{before}"
    print(f"champion: #{chosen}, every file as it was published{instead}")
    _print_usage(name, "@champion")


@versions_group.command()
def rollback(mlflow_uri: UriOption = None, runs: StoreRunsOption = RUNS, name: NameOption = None) -> None:
    """Make the champion before the present one the champion again."""
    from store.registry.retention import rollback as step_back

    name = choose_model(uri := store_of(mlflow_uri, runs), name)
    lost, found = step_back(uri, name)
    print(f"champion: #{found} again{'' if lost is None else f', instead of #{lost}'}")
    _print_usage(name, "@champion")


@versions_group.command()
def sync(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Folders or URIs of runs. [default: all below --runs]"),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            min=0,
            help="Then delete versions from MLflow, except champion, candidate, their lineage and the N newest.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --keep: print what would be deleted; nothing is sent or deleted.")
    ] = False,
    mlflow_uri: UriOption = None,
    runs: StoreRunsOption = RUNS,
    name: NameOption = None,
    as_json: PrintJsonOption = False,
) -> None:
    """Send to MLflow what it lacks of runs, as after an outage. Their folders have everything and do not change."""
    from store.registry.retention import prune

    if dry_run and keep is None:
        raise UsageError("--dry-run needs --keep, the number of newest versions that would stay")
    sent = {} if dry_run else _send(places, runs, mlflow_uri)
    gone = None
    if keep is not None:
        uri = store_of(mlflow_uri, runs)
        gone = prune(uri, choose_model(uri, name), keep, dry_run)
    if as_json:
        print(json.dumps({"sent": sent, "would_delete" if dry_run else "deleted": gone or []}, indent=2))
        return
    for run, numbers in sent.items():
        print(f"{to_printable(run)}: versions sent: {numbers['versions']}, points: {numbers['points']}")
    if gone:
        print(f"{'would delete' if dry_run else 'deleted'} {', '.join(f'#{number}' for number in gone)}")
    elif gone is not None:
        print("nothing to delete: every version is in use, in the lineage of one that is, or among the newest")


def _send(places: Sequence[str] | None, runs: Path, mlflow_uri: str | None) -> dict[str, dict[str, int]]:
    """Send what is missing of each run; return the numbers of versions and points, by run."""
    from pipeline.run.folder import open_run
    from pipeline.run.mlflow_run import sync_run
    from store.registry.run_description import FILE

    found, refused = dict[str, dict[str, int]](), list[str]()
    for place in places or sorted(str(path.parent) for path in runs.glob(f"*/{FILE}")):
        folder, mirror = open_run(Path(place))
        try:
            sent = sync_run(folder, mirror.name, mlflow_uri)
        except OmnidraftError as error:  # the others do not wait for it
            refused.append(f"{mirror.name}: {error}")
            continue
        found[mirror.name] = {"versions": sent.versions, "points": sent.points}
        refused += [f"{mirror.name}: {reason}" for reason in sent.refused]
    if refused:
        raise OmnidraftError(f"every run must be sent, but of {'; '.join(refused)}")
    return found


@versions_group.command()
def compare(
    first: Annotated[
        str,
        typer.Argument(metavar="A", help="Number, alias, a version's folder, or `baseline`: that of the other side."),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="As A.")],
    probe: Annotated[
        str | None, typer.Option(help="A prompt source, as of `replay`. [default: the fixed probe]")
    ] = None,
    limit: Annotated[int | None, option("source.limit", f"Most prompts. [default: {LIMIT}]", min=1)] = None,
    target: Annotated[str | None, typer.Option(help="Another target than the versions were made for.")] = None,
    as_served: Annotated[
        bool, typer.Option("--as-served", help="With each version's head and with lookup, as `replay` drafts.")
    ] = False,
    temperature: Annotated[float | None, option("sampling.temperature")] = None,
    max_new_tokens: Annotated[int | None, option("sampling.max_new_tokens")] = None,
    max_draft: Annotated[int | None, option("draft.max_draft")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    settings: Annotated[
        list[str] | None, set_option("Any other setting, such as dtype=bfloat16; may be repeated.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for all results, prompt by prompt; - prints them instead.")
    ] = None,
    no_publish: Annotated[bool, typer.Option("--no-publish", help="Write nothing to MLflow.")] = False,
    mlflow_uri: UriOption = None,
    runs: StoreRunsOption = RUNS,
    name: NameOption = None,
) -> None:
    """Replay two versions on the same prompts with the same draws, and print paired differences.

    Nothing learns, and every draft has --max-draft pieces, so that only the drafters are compared.
    """
    from pipeline.config.settings import Config
    from pipeline.versions.compare import compare as run
    from pipeline.versions.compare import (
        describe_result,
        make_comparison_config,
        read_prompts,
        require_free,
        table_heads,
        table_rows,
    )
    from pipeline.versions.sides import is_folder, open_sides

    _require_writable(json_file)
    changed, given = parse_settings(settings), overrides_of(compare, locals())
    require_free(changed, as_served=as_served)
    config, uri = Config().with_overrides({"source.limit": LIMIT} | changed | given), store_of(mlflow_uri, runs)
    folders = all(map(is_folder, (first, second)))
    name, prompts = "" if folders else choose_model(uri, name), read_prompts(config, probe)
    with TemporaryDirectory() as scratch:
        sides = open_sides((first, second), uri, name, Path(scratch) / "versions")
        config = make_comparison_config(config, target=target, sides=sides, as_served=as_served, probe=probe)
        with _progress(len(prompts)) as progress:
            done = run(config, sides, prompts, uri, Path(scratch), progress)
        if json_file != STANDARD_OUTPUT:
            print_table(table_heads(done), table_rows(done))
            print(*describe_result(done), sep="\n")
        _keep(done, json_file, None if no_publish else uri, name, Path(scratch))


def _require_writable(json_file: Path | None) -> None:
    if json_file == STANDARD_OUTPUT:
        return
    require_file("--json", json_file)
    if json_file and not os.access(json_file if json_file.exists() else json_file.absolute().parent, os.W_OK):
        raise UsageError(f"--json must name a file that can be written, got '{json_file}'")


@contextmanager
def _progress(prompts: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while it runs, of which nothing stays."""
    from rich.progress import Progress

    with Progress(console=stderr_console(), transient=True) as bar:
        task = bar.add_task("prompts", total=prompts)
        yield lambda done: bar.update(task, completed=done)


def _keep(done: "Comparison", json_file: Path | None, uri: str | None, name: str, scratch: Path) -> None:
    """Write the results to a file, if one is named, and to MLflow, if both versions are there."""
    text = json.dumps(done.to_json(), indent=2, allow_nan=False) + "\n"
    if json_file == STANDARD_OUTPUT:
        print(text, end="")
    elif json_file is not None:
        try:
            json_file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"'{json_file}' could not be written: {error.strerror}; name another with --json"
            ) from error
    first, second = done.numbers
    if uri is not None and first is not None and second is not None:
        from store.registry.mlflow_comparisons import record_comparison

        (scratch / "comparison.json").write_text(text, encoding="utf-8")
        run = record_comparison(uri, name, first, second, done.flatten_metrics(), [scratch / "comparison.json"])
        if json_file != STANDARD_OUTPUT:
            print(f"MLflow: run {run}")


@versions_group.command()
def export(
    number: Version,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.", show_default=False)],
    mlflow_uri: UriOption = None,
    runs: StoreRunsOption = RUNS,
    name: NameOption = None,
) -> None:
    """Write a version as a plain Hugging Face drafter that `transformers`, vLLM and llama.cpp load, with a card."""
    from pipeline.versions.export import export_version

    name, chosen = _choose_version(uri := store_of(mlflow_uri, runs), name, number)
    export_version(uri, name, chosen, folder)
    print(f"#{chosen} is in {folder}; {folder / 'README.md'} describes how to use it")


def _print_usage(name: str, which: str) -> None:
    print(f"use it: omnidraft replay --drafter models:/{name}{which}")


def _print_versions(name: str, versions: Sequence["RegisteredVersion"]) -> None:
    """The versions of one pair, under its name."""
    pair = next((f"{one.drafter} for {one.target}: " for one in versions if one.drafter and one.target), "")
    print(f"{to_printable(pair)}models:/{to_printable(name)}")
    print_table(_HEADS, map(_row, versions))


def _format_estimate(value: float | None, interval: tuple[float, float] | None, digits: int) -> str | None:
    if value is None or interval is None:
        return None if value is None else f"{value:.{digits}f}"
    return f"{value:.{digits}f} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


def _row(version: "RegisteredVersion") -> list[str]:
    aliases, when = ", ".join(version.aliases), f"{version.created_at:%Y-%m-%d %H:%M}"
    within = None if version.run is None or version.version is None else f"{version.run}/{version.version}"
    parent = None if version.parent is None else f"#{version.parent}"
    probe = _format_estimate(version.probe, version.probe_interval, 3)
    speed = _format_estimate(version.tokens_per_second, version.tokens_per_second_interval, 1)
    fields = (f"#{version.number}", aliases, within, probe, speed, version.reason, version.offset, parent, when)
    return [to_printable(value) for value in fields]


def _print_details(details: "VersionDetails", name: str) -> None:
    manifest = details.manifest
    files = {file: f"sha256 {digest[:16]}…" for file, digest in manifest["files"].items()}
    plain = {
        key: value
        for key, value in manifest.items()
        if key not in ("files", "counters", "metrics", "version", "parent")
    }
    plain["run/version"] = f"{manifest['run']}/{manifest['version']}"
    if manifest["parent"] is not None:
        plain["parent"] = f"{manifest['run']}/{manifest['parent']}"
    tags = {key: value for key, value in details.tags.items() if key not in ("version", "parent")}
    if details.summary.parent is not None:
        tags["parent in the registry"] = f"#{details.summary.parent}"
    for title, values in (
        ("manifest", plain),
        ("counters", manifest["counters"]),
        ("files", files),
        ("metrics", details.metrics),
        ("settings", details.params),
        ("tags", {**tags, "number": f"#{details.summary.number}", "aliases": ", ".join(details.summary.aliases)}),
    ):
        print_table((title, ""), ((key, to_printable(value)) for key, value in sorted(values.items())))
    _print_usage(name, f"/{details.summary.number}")
