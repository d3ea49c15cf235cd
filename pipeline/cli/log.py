"""`omnidraft sql`, `check` and `compact`: query, verify and compact a log, all without torch."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.runs import local_run, newest_run
from pipeline.config.cli_options import PrintJsonOption, RunOption, RunsOption
from pipeline.reports.rows import PIPE_COLUMNS, RowFormat, print_rows, to_objects
from pipeline.reports.terminal import make_console
from store.errors import QueryError, RunError

LOG = logging.getLogger("omnidraft.cli")

SkipOption = Annotated[
    bool,
    typer.Option("--skip-damaged", help="Leave out files that are not as they were committed."),
]


def _complete_recipes(incomplete: str) -> list[str]:
    from store.query.views import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


def sql(
    query: Annotated[str | None, typer.Argument(help="One SELECT statement.", show_default=False)] = None,
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    output: Annotated[RowFormat, typer.Option("--format", help="How to print the rows.")] = RowFormat.TABLE,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="A named query.", show_default=False, autocompletion=_complete_recipes),
    ] = None,
    skip_damaged: SkipOption = False,
    all_runs: Annotated[bool, typer.Option("--all-runs", help="Query all runs below --runs as one log.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, as --format json.")] = False,
) -> None:
    """Query the log of a run in SQL, by default that of the newest.

    Without a query, list the views and the recipes.
    """
    from store.query.log_reader import LogReader

    output = RowFormat.JSON if as_json else output
    if run and all_runs:
        raise QueryError("there must be one --run or --all-runs, got both; leave one out")
    if query is not None and recipe is not None:
        raise QueryError("there must be a query or a --recipe, got both; leave one out")
    if query is None and recipe is None:
        _print_views_and_recipes()
        return
    most = None if output.row_limit is None else output.row_limit + 1
    with LogReader([local_run(run, runs)] if run else _choose_runs(runs, all_runs), skip_damaged=skip_damaged) as log:
        for path in log.damaged:
            LOG.warning("%s is not as it was written; left out", path)
        rows = log.select(query, most) if query is not None else log.recipe(str(recipe), most)
    print_rows(rows, output)


def _choose_runs(runs: Path, all_runs: bool) -> Sequence[Path]:
    from store.query.log_reader import run_folders

    found = run_folders(runs)
    if all_runs or len(found) == 1:
        return found
    newest = newest_run(runs)
    LOG.info("the newest of %d runs: %s; --all-runs queries all", len(found), newest.name, extra={"run": newest.name})
    return [newest]


def check(run: RunOption = None, runs: RunsOption = Path("runs"), as_json: PrintJsonOption = False) -> None:
    """Verify a log: decide every judged token again from its own row.

    Count all again, and compare files with their digests. Exit status 1 if anything disagrees. What is damaged is
    named, and the rest is looked at all the same.
    """
    from store.log.manifest import MANIFEST, manifest_damage
    from store.log.partitions import log_folders
    from store.query.log_reader import LogReader

    folder = local_run(run, runs)
    with LogReader([folder], skip_damaged=True) as log:
        for path in log.damaged:
            LOG.warning("%s is not as it was written", path)
        found, changed = log.check(), list(map(str, log.damaged))
    changed += [str(one / MANIFEST) for one in log_folders(folder) if manifest_damage(one)]  # each was warned about
    wrong = found.mismatches, found.miscounts
    if as_json:
        counts = {"run": str(folder), "decisions": found.decisions, "judged": found.judged}
        lists = {"mismatches": to_objects(wrong[0]), "miscounts": to_objects(wrong[1])}
        print(json.dumps({**counts, **lists, "changed_files": changed}, indent=2))
    else:
        for rows in wrong:
            if rows.num_rows:
                print_rows(rows, RowFormat.TABLE)
        mismatches, miscounts = wrong[0].num_rows, wrong[1].num_rows
        print(
            f"{folder}: derived {found.judged:,} judged decisions again (of {found.decisions:,} in the log): "
            f"{_plural(mismatches, 'mismatch', 'es')}, {_plural(miscounts, 'wrong count')}, "
            f"{_plural(len(changed), 'changed file')}"
        )
    if changed or any(rows.num_rows for rows in wrong):
        raise typer.Exit(1)


def compact(
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds for which replaced files stay for readers.")
    ] = 3600.0,
    as_json: PrintJsonOption = False,
) -> None:
    """Join small parts of one run's log, or of all below a folder.

    This is safe while a run writes and others read.
    """
    from store.log.compaction import compact as join_parts
    from store.object_store.uri import uri_of
    from store.query.log_reader import run_folders

    if run and uri_of(run):
        raise RunError(f"a log that is compacted must be in a folder, got {uri_of(run)}; leave it as it is")
    reports = []
    for folder in [run] if run else run_folders(runs):
        done = join_parts(folder, grace=grace)
        for path in done.damaged:
            LOG.warning("%s is not as it was written; left as it is", path)
        if as_json:
            reports.append({"run": str(folder), **asdict(done), "damaged": list(map(str, done.damaged))})
            continue
        print(
            f"{folder}: {done.parts_before:,} parts became {done.parts_after:,}, {done.bytes_before:,} to "
            f"{done.bytes_after:,} bytes; {_plural(done.removed, 'replaced file')} removed"
        )
    if as_json:
        print(json.dumps(reports, indent=2))


def _plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def _print_views_and_recipes() -> None:
    from rich.table import Table
    from rich.text import Text

    from store.query.log_reader import VIEWS, LogReader, recipes

    views = Table("view", "columns", title="Views", title_justify="left")
    with LogReader([]) as log:
        for view in VIEWS:
            views.add_row(view, Text(", ".join(name for name, _ in log.columns(view))))
    named = Table("recipe", "what it shows", title="Recipes", title_justify="left")
    for recipe in recipes().values():
        named.add_row(recipe.name, Text(recipe.description))
    make_console(PIPE_COLUMNS).print(views, named)
    print(
        'omnidraft sql --recipe NAME, or omnidraft sql "SELECT ..."; DESCRIBE view shows the types. '
        'offset is a word of SQL: write "offset" or prompts.offset. text_of(bytes) decodes a token.'
    )
