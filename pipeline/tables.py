"""The table at the end of a run."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _change(figures: Mapping[str, Any], key: str, digits: int) -> str:
    """First fifth -> last fifth."""
    return f"{_number(figures['first_fifth'][key], digits)} → {_number(figures['last_fifth'][key], digits)}"


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A run's summary, one row per dataset; rates as first fifth → last fifth of its prompts."""
    table = Table(title=f"run {summary['run']}", caption="rates: first fifth → last fifth of the dataset's prompts")
    table.add_column("dataset", overflow="fold")
    for column in ("prompts", "tokens", "tokens/s", "acceptance", "tokens/forward"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("drifts at")
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
            ", ".join(str(version["version"]) for version in figures["versions"]) or "-",
        )
    if summary["rejected_rows"]:
        table.add_section()
        table.add_row("rejected rows", str(summary["rejected_rows"]))
    return table
