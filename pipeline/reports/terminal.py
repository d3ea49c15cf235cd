"""Output of commands for people: to_printable lines and tables, and checks of the files that a command writes.

Functions import rich when they need it: the help of a command must not wait for it.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

LOG, LOADING = logging.getLogger("omnidraft.terminal"), logging.getLogger("omnidraft.loading")

PIPE_COLUMNS = 200  # wide enough that a table in a pipe is not folded
RESULT_COLUMNS = 120  # width of tables of results, whose long cells are folded
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
FEWEST_JUDGED = 10  # tokens that an acceptance rate in a table is over


@contextmanager
def new_folder(named: Path) -> Iterator[Path]:
    """Resolve a new or empty folder that the block may replace by another one. Raises `UsageError` for any other, or if
    the block cannot write it.
    """
    try:
        folder = named.resolve()
        if folder == Path.cwd().resolve():
            raise UsageError(f"a new folder must be named, but {named} is the working directory; name one below it")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"a new or empty folder must be named, but {named} holds files; name another")
        yield folder
    except OSError as error:
        raise UsageError(
            f"{named} must be a folder that can be made and written: {error.strerror or error}; name another"
        ) from error


def require_file(flag: str, path: Path | None) -> None:
    """Refuse a file that could not be written after the measurement."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"{flag} must name a file in a folder that exists, got '{path}'")


def make_console(pipe_columns: int = PIPE_COLUMNS) -> "Console":
    """Make a console on standard output; in a pipe it is wide, so that no table is folded, unless `COLUMNS` is set."""
    from rich.console import Console

    return Console(width=width_of_output() or pipe_columns)


def width_of_output() -> int | None:
    """Return the width of standard output in columns: of the terminal, or from `COLUMNS`; None for a pipe or a file."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


_STDERR: list["Console"] = []  # at most one


def stderr_console() -> "Console":
    """Return the process's only console on standard error, so that log lines and live displays do not interleave."""
    from rich.console import Console

    if not _STDERR:
        _STDERR.append(Console(stderr=True))
    return _STDERR[0]


@contextmanager
def own_stderr_console(*, quiet: bool) -> Iterator[None]:
    """Let `stderr_console` return a new console while the block runs; a quiet one shows nothing."""
    _STDERR.clear()
    if quiet:
        from rich.console import Console

        _STDERR.append(Console(stderr=True, quiet=True, force_terminal=False))
    try:
        yield
    finally:
        _STDERR.clear()


@contextmanager
def status(text: str = "", *, is_long: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a transient line on standard error while the block runs. Yields a function that changes its text.

    It also shows how far the loading of a model is (`stages/engine/checkpoints/loading.py`), in a terminal alone. A
    text that `is_long` on the screen is logged where standard error is no terminal, so that a pipe is not silent for
    long.
    """
    if is_long and not stderr_console().is_terminal:
        LOG.info("%s", text)
    from rich.text import Text

    with stderr_console().status(text) as line:

        def show(record: logging.LogRecord) -> bool:
            line.update(Text(record.getMessage()))
            return False  # the record goes nowhere else

        LOADING.addFilter(show)
        try:
            yield line.update
        finally:
            LOADING.removeFilter(show)


def show_or_json(values: Mapping[str, Any], as_json: bool, show: Callable[["Console"], None]) -> None:
    """Print results as JSON, or let `show` print them to a console."""
    if as_json:
        print(json.dumps(values, ensure_ascii=False, indent=2))
    else:
        show(make_console(RESULT_COLUMNS))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below their heads, and an empty line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    make_console().print(table, "")


def make_table(heads: Sequence[str], rows: Iterable[Sequence[str]] = (), title: str = "") -> "Table":
    """Make a table of results; the first column is aligned to the left, the others to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def to_printable(value: object) -> str:
    """Return one to_printable line; text from a server must not control the terminal."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def format_duration(seconds: float) -> str:
    """Format a time that is known roughly.

    >>> [format_duration(seconds) for seconds in (4.4, 119, 130, 7260)]
    ['4 s', '119 s', '2 min', '2 h 01 min']
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _format_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _format_change(metrics: Mapping[str, Any], key: str, digits: int, fewest: int = 0) -> str:
    """Format a metric of the first and of the last fifth of the prompts; one over few judged tokens is left out."""
    parts = [metrics["first_fifth"], metrics["last_fifth"]]
    values = (part[key] if part["judged_tokens"] >= fewest else None for part in parts)
    return "→".join(_format_number(value, digits) for value in values)


def _format_acceptance(metrics: Mapping[str, Any]) -> str:
    return _format_change(metrics, "acceptance_rate", 3, FEWEST_JUDGED)


def _format_numbers(numbers: Sequence[int]) -> str:
    """Format numbers as `3`, `3-7`, `3, 5`, or `-` for none."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "-"


def make_summary_table(summary: Mapping[str, Any]) -> "Group":
    """Format a run's summary in 80 columns: a row per dataset, then a row per target if there are several, then the
    ledger.
    """
    from rich.console import Group
    from rich.text import Text

    tables = [_make_groups_table(f"run {summary['run']}", "dataset", summary["datasets"])]
    if len(summary["targets"]) > 1:
        tables.append(_make_groups_table("by target", "target", summary["targets"]))
    return Group(*tables, *(Text(note, "italic") for note in _list_notes(summary)))


def _make_groups_table(title: str, heading: str, groups: Mapping[str, Any]) -> "Table":
    """Make a table of datasets or targets; rates as first fifth→last fifth of their prompts."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(heading, overflow="fold")
    for column in ("prompts", "tokens", "tokens/s", "acceptance", "tokens/\nforward"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("drift\nat")
    table.add_column("versions")
    for name, metrics in groups.items():
        acted_upon = [drift for drift in metrics["drifts"] if drift["action"] in ("reset", "recall")]
        table.add_row(
            name,
            f"{metrics['prompts']:,}",
            f"{metrics['emitted_tokens']:,}",
            _format_number(metrics["tokens_per_second"], 1),
            _format_acceptance(metrics),
            _format_change(metrics, "block_efficiency", 2),
            ", ".join(str(drift["offset"]) for drift in acted_upon) or "-",
            _format_numbers([version["version"] for version in metrics["versions"]]),
        )
    return table


def _list_notes(summary: Mapping[str, Any]) -> Iterator[str]:
    totals = summary["totals"]
    yield from (f"{name}: {finding}" for name, finding in summary.get("findings", {}).items())
    yield "acceptance, tokens/forward: first fifth→last fifth of the prompts"
    if any("-" in _format_acceptance(metrics) for metrics in summary["datasets"].values()):
        yield f"acceptance -: fewer than {FEWEST_JUDGED} tokens of the drafter model were judged"
    if interval := totals.get("acceptance_interval"):
        range_of_rate = f"{interval[0]:.2f} to {interval[1]:.2f}, {totals['judged_tokens']:,} judged"
        yield f"acceptance of the drafter model: {_format_number(totals['acceptance_rate'], 3)} ({range_of_rate})"
    if ended := totals.get("ended_by_length"):
        yield f"answers that ended by their length: {ended:,} of {totals['prompts']:,} (--max-new-tokens)"
    if summary["rejected_rows"]:
        yield f"source rows that were no prompts: {summary['rejected_rows']:,}, see rejected.jsonl"
