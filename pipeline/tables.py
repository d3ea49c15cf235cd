"""The tables at the end of a run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _change(figures: Mapping[str, Any], key: str, digits: int) -> str:
    """First fifth -> last fifth."""
    return f"{_number(figures['first_fifth'][key], digits)}→{_number(figures['last_fifth'][key], digits)}"


def _span(numbers: Sequence[int]) -> str:
    """`3`, `3-7`, `3, 5`, or `-` for none."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "-"


def summary_table(summary: Mapping[str, Any]) -> Group:
    """A run's summary in 80 columns: one row per dataset, then one per target if there are several, then the ledger."""
    parts: list[Table | Text] = [_table(f"run {summary['run']}", "dataset", summary["datasets"])]
    if len(summary["targets"]) > 1:
        parts.append(_table("by target", "target", summary["targets"]))
    return Group(*parts, *_notes(summary))


def _table(title: str, of: str, groups: Mapping[str, Any]) -> Table:
    """Figures of datasets or targets; rates as first fifth→last fifth of their prompts."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(of, overflow="fold")
    for column in ("prompts", "tokens", "tokens/s", "acceptance", "tokens/\nforward"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("drifts")
    table.add_column("versions")
    for name, figures in groups.items():
        acted_upon = [drift for drift in figures["drifts"] if drift["action"] in ("reset", "recall")]
        table.add_row(
            name,
            f"{figures['prompts']:,}",
            f"{figures['emitted_tokens']:,}",
            _number(figures["tokens_per_second"], 1),
            _change(figures, "acceptance_rate", 3),
            _change(figures, "block_efficiency", 2),
            ", ".join(str(drift["offset"]) for drift in acted_upon) or "-",
            _span([version["version"] for version in figures["versions"]]),
        )
    return table


def _notes(summary: Mapping[str, Any]) -> Iterator[Text]:
    yield Text("acceptance, tokens/forward: first fifth→last fifth of the prompts", "italic")
    ledger = summary["totals"]["ledger"]
    if ledger["update_seconds"]:
        spent, gained = _number(ledger["update_seconds"], 1), _number(ledger["tokens_gained"], 0)
        saved = _number(ledger["seconds_saved"], 1)
        waited = _number(ledger["waited_seconds"], 1)
        yield Text(f"learning: {spent} s ({waited} s waited for), {gained} tokens gained, worth {saved} s", "italic")
    if share := summary["totals"].get("lookup_share"):
        rate = _number(summary["totals"]["lookup_acceptance_rate"], 3)
        yield Text(f"lookup: {share:.1%} of the target forwards, acceptance {rate}", "italic")
    if summary["rejected_rows"]:
        told = f"source rows that were no prompts: {summary['rejected_rows']:,}, see rejected.jsonl"
        yield Text(told, "italic")
