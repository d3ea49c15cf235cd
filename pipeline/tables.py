"""The table at the end of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table


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


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A run's summary, one row per dataset, 80 columns wide; rates as first fifth→last fifth of its prompts."""
    caption = "acceptance, tokens/forward: first fifth→last fifth of the prompts"
    if summary["rejected_rows"]:
        caption += f"\nsource rows that were no prompts: {summary['rejected_rows']:,}, see rejected.jsonl"
    title = f"run {summary['run']}"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("dataset", overflow="fold")
    for column in ("prompts", "tokens", "tokens/s", "acceptance", "tokens/\nforward"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("drifts")
    table.add_column("versions")
    for name, figures in summary["datasets"].items():
        table.add_row(
            name,
            f"{figures['prompts']:,}",
            f"{figures['emitted_tokens']:,}",
            _number(figures["tokens_per_second"], 1),
            _change(figures, "acceptance_rate", 3),
            _change(figures, "block_efficiency", 2),
            ", ".join(str(drift["offset"]) for drift in figures["drifts"] if drift["action"] == "reset") or "-",
            _span([version["version"] for version in figures["versions"]]),
        )
    return table
