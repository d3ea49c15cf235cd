"""`omnidraft versions`: what MLflow holds, which version is in service, and what the versions are worth.

Torch is loaded only when `compare` or `export` really starts.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from pipeline.cli.runs import write_store
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
_HEADS = ("version", "aliases", "acceptance on the probe", "published", "changes", "in MLflow")


_ABOUT_VERSION = "RUN/VERSION of the list, its number in MLflow, or an alias such as champion."
Version = Annotated[str, typer.Argument(metavar="VERSION", help=_ABOUT_VERSION, show_default=False)]
OptionalVersion = Annotated[str | None, typer.Argument(metavar="[VERSION]", help=_ABOUT_VERSION, show_default=False)]
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
    """The registered model and the number of a version, see `resolve_number`."""
    from store.registry.registry import resolve_number

    name = choose_model(uri, name)
    return name, resolve_number(uri, name, text)


def _label(uri: str, name: str, number: int) -> str:
    """What a version is called here, given its number in MLflow."""
    from store.registry.registry import list_versions

    return next((one.label for one in list_versions(uri, name) if one.number == number), f"#{number}")


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
            parent = details.summary.parent
            _print_details(details, None if parent is None else _label(uri, name, parent))
            _print_usage(f"{name}/{details.summary.number}", mlflow_uri, runs)
        return
    found = list_versions(uri, name)
    if as_json:
        print(json.dumps([asdict(version) for version in found], default=str, indent=2))
    elif not found:
        print(f"{name or 'the registry'} has no version yet; `omnidraft replay` publishes some")
    else:
        for model, group in groupby(found, attrgetter("name")):
            versions = list(group)
            pair = next((f"{one.drafter} for {one.target}: " for one in versions if one.drafter and one.target), "")
            print(f"{to_printable(pair)}models:/{to_printable(model)}")
            print_table(_HEADS, map(_row, versions))


@versions_group.command()
def promote(
    number: Version,
    mlflow_uri: UriOption = None,
    runs: StoreRunsOption = RUNS,
    name: NameOption = None,
) -> None:
    """Make a version the champion, the one that `models:/NAME@champion` means, after every file was checked."""
    from store.registry.registry import fetch_version
    from store.registry.registry import promote as put_forward

    name, chosen = _choose_version(uri := store_of(mlflow_uri, runs), name, number)
    with TemporaryDirectory() as scratch:
        fetch_version(f"models:/{name}/{chosen}", uri, Path(scratch) / "version")
    before = put_forward(uri, name, chosen)
    instead = "" if before in (None, chosen) else f"; instead of {_label(uri, name, before)}"
    print(f"champion: {_label(uri, name, chosen)}, every file as it was published{instead}")
    _print_usage(f"{name}@champion", mlflow_uri, runs)


@versions_group.command()
def rollback(mlflow_uri: UriOption = None, runs: StoreRunsOption = RUNS, name: NameOption = None) -> None:
    """Make the champion before the present one the champion again."""
    from store.registry.registry import rollback as step_back

    name = choose_model(uri := store_of(mlflow_uri, runs), name)
    lost, found = step_back(uri, name)
    instead = "" if lost is None else f", instead of {_label(uri, name, lost)}"
    print(f"champion: {_label(uri, name, found)} again{instead}")
    _print_usage(f"{name}@champion", mlflow_uri, runs)


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
    from store.registry.registry import prune

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
        typer.Argument(metavar="A", help="RUN/VERSION, alias, a version's folder, or `baseline`: the other side's."),
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
    """Say whether two versions really differ, by replaying both on the same prompts with the same draws.

    Nothing learns, and every draft has --max-draft pieces, so that only the drafters are compared. It ends as soon as
    the difference is sure; equal drafters are not replayed.
    """
    from pipeline.versions.sides import describe_equal, is_folder, open_sides, require_free

    _require_writable(json_file)
    require_free(changed := parse_settings(settings), as_served=as_served)
    began, uri, folders = time.time(), store_of(mlflow_uri, runs), all(map(is_folder, (first, second)))
    name = "" if folders else choose_model(uri, name)
    with TemporaryDirectory() as scratch:
        sides = open_sides((first, second), uri, name, Path(scratch) / "versions")
        if equal := describe_equal(*sides, as_served=as_served):
            _write_json({"sides": [side.label for side in sides], "equal": equal}, json_file)
            print(equal, file=sys.stderr if json_file == STANDARD_OUTPUT else sys.stdout)
            return
        from pipeline.config.settings import Config
        from pipeline.versions import compare as comparing

        usual = {"source.limit": LIMIT} | (comparing.AS_PROBED if probe is None else {})
        config = Config().with_overrides(usual | changed | overrides_of(compare, locals()))
        prompts = comparing.read_prompts(config, probe)
        config = comparing.make_comparison_config(config, target=target, sides=sides, as_served=as_served, probe=probe)
        with _progress(len(prompts)) as progress:
            done = comparing.compare(config, sides, prompts, uri, Path(scratch), progress)
        if json_file != STANDARD_OUTPUT:
            _print_comparison(done)
        _write_json(done.to_json(), json_file)
        if not no_publish and None not in done.numbers:
            _record(done, uri, name, (began, time.time()), Path(scratch) / "comparison.json")


def _print_comparison(done: "Comparison") -> None:
    from pipeline.versions.compare import describe_result, table_rows

    print(describe_result(done))
    print_table(("", *done.sides, "change", "95% interval"), table_rows(done))


def _record(done: "Comparison", uri: str, name: str, span: tuple[float, float], file: Path) -> None:
    """Write a comparison of two registered versions to MLflow."""
    from store.registry.mlflow_comparisons import record_comparison

    _write_json(done.to_json(), file)
    first, second = map(int, filter(None, done.numbers))
    record_comparison(uri, name, first, second, done.flatten_metrics(), [file], span)


def _require_writable(json_file: Path | None) -> None:
    if json_file == STANDARD_OUTPUT:
        return
    require_file("--json", json_file)
    if json_file and not os.access(json_file if json_file.exists() else json_file.absolute().parent, os.W_OK):
        raise UsageError(f"--json must name a file that can be written, got '{json_file}'")


@contextmanager
def _progress(prompts: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on standard error while it runs, of which nothing stays; elsewhere than on a terminal, some lines."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task("", total=prompts)

        def show(done: int, text: str) -> None:
            bar.update(task, completed=done, description=text)
            if not bar.console.is_terminal and done % 4 == 0:
                print(f"{done}/{prompts} prompts, {text}", file=sys.stderr, flush=True)

        yield show


def _write_json(values: Mapping[str, Any], file: Path | None) -> None:
    """Write values to a file or to standard output, if one is named."""
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    if file == STANDARD_OUTPUT:
        print(text, end="")
    elif file is not None:
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"'{file}' could not be written: {error.strerror}; name another with --json") from error


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
    print(f"{_label(uri, name, chosen)} is in {folder}; {folder / 'README.md'} describes how to use it")


def _print_usage(which: str, mlflow_uri: str | None, runs: Path) -> None:
    print(f"use it: omnidraft replay --drafter {shlex.quote(f'models:/{which}')}{write_store(mlflow_uri, runs)}")


def _row(version: "RegisteredVersion") -> list[str]:
    aliases, probe = ", ".join(version.aliases), "" if version.probe is None else f"{version.probe:.3f}"
    if version.probe_interval:
        low, high = version.probe_interval
        probe += f" ({low:.3f} to {high:.3f})"
    when = f"{version.created_at:%Y-%m-%d %H:%M} UTC, {version.reason}"
    when += "" if version.parent is None else f" at prompt {version.offset}"
    values = (version.label, aliases, probe, when, version.changes, version.number)
    return [to_printable(value) for value in values]


def _print_details(details: "VersionDetails", parent: str | None) -> None:
    """The version in a sentence, then what its files, metrics and settings are. `parent`: what its parent is called."""
    one, manifest = details.summary, details.manifest
    print(to_printable(f"{one.label}, {one.reason} at prompt {manifest['offset']}: {one.changes}"))
    plain = {
        "aliases": ", ".join(one.aliases),
        "number in MLflow": one.number,
        "parent": parent,
        "prompts since its parent": details.tags.get("prompts"),
        "datasets": details.tags.get("datasets"),
        **{key: manifest[key] for key in ("target", "drafter", "drift", "created_at", "pair", "digest")},
    }
    counters = {f"counter {key}": value for key, value in manifest["counters"].items()}
    files = {file: f"sha256 {digest[:16]}…" for file, digest in manifest["files"].items()}
    for title, values in (
        ("version", {key: value for key, value in (plain | counters).items() if value not in (None, "")}),
        ("metrics", details.metrics),
        ("settings of its run", details.params),
        ("files", files),
    ):
        print_table((title, ""), ((key, to_printable(value)) for key, value in sorted(values.items())))
