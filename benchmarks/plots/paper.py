"""Draws one of the paper's tables or figures: `python -m benchmarks.plots.paper table-panels.json table-1.svg`.

The file holds panels (`benchmarks/studies/paper/panels.py`): curves, or one mark per category and series. Bars are
standard errors over seeds. The paper's values are hollow.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots.results import read_json
from dashboards.plots import BLUE, GREEN, GREY, ORANGE, PINK, panels, plot_parser, run_command
from store.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2
COLORS = (BLUE, ORANGE, GREEN, PINK, GREY, "#56b4e9", "#e69f00", "#000000")
MARKERS = "os^Dv<>P"
STYLES = ("-", "--", ":", "-.")
PanelValues = Mapping[str, Any]


def read_panels(path: Path) -> tuple[str, list[PanelValues]]:
    """Read the title and the panels of a file.

    Raises:
        RunError: there is no such file, or it has no panels.
        CorruptError: the file is of another kind.
    """
    maker = "python -m benchmarks.studies paper"
    title, found = read_json(path, "a file of panels", maker, lambda content: (content["title"], content["panels"]))
    if not found:
        raise RunError(f"{path} must hold panels, but is empty; run `{maker}` to its end")
    return str(title), list(found)


def draw(title: str, found: Sequence[PanelValues], file: Path) -> None:
    """Write the plots in two columns; the suffix of the file determines its format (png, svg, pdf)."""
    columns = min(COLUMNS, len(found))
    rows = -(-len(found) // columns)
    height = max(3.4, *(1.2 + 0.34 * len(panel["categories"]) for panel in found))
    with panels(file, rows, columns, figsize=(5.6 * columns, height * rows), layout="constrained") as (whole, grid):
        for axes in grid.flat[len(found) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.flat, found, strict=False):
            _draw_categories(axes, panel) if panel["categories"] else _draw_curves(axes, panel)
            axes.set_title(panel["title"], fontsize=9)
            axes.grid(alpha=0.25)
        whole.suptitle(title)


def _draw_categories(axes: "Axes", panel: PanelValues) -> None:
    """Plot one mark per category and series, the first category at the top."""
    places = range(len(panel["categories"]))
    for number, series in enumerate(panel["series"]):
        color = COLORS[number % len(COLORS)]
        axes.errorbar(
            [nan if value is None else value for value in series["values"]],
            places,
            xerr=_errors(series),
            color=color,
            marker=MARKERS[number % len(MARKERS)],
            markerfacecolor="white" if series["is_paper"] else color,
            linestyle="none",
            capsize=3,
            label=series["name"],
        )
    axes.set_yticks(places, panel["categories"], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(panel["value"], fontsize=8)
    axes.legend(fontsize=7)


def _draw_curves(axes: "Axes", panel: PanelValues) -> None:
    for number, series in enumerate(panel["series"]):
        values = [nan if value is None else value for value in series["values"]]
        color = COLORS[number % len(COLORS)]
        style = STYLES[number % len(STYLES)]
        axes.plot(series["at"], values, color=color, linestyle=style, linewidth=1.6, label=series["name"])
        if errors := _errors(series):
            low = [value - error for value, error in zip(values, errors, strict=True)]
            high = [value + error for value, error in zip(values, errors, strict=True)]
            axes.fill_between(series["at"], low, high, color=color, alpha=0.15, linewidth=0)
    for name, at in (panel["marks"] or {}).items():
        axes.axvline(at, color=GREY, linewidth=1)
        axes.annotate(name, (at, 1), xycoords=("data", "axes fraction"), fontsize=7, rotation=90, va="top", ha="right")
    if panel["is_logarithmic"]:
        axes.set(xscale="log", yscale="log")
    axes.set_xlabel(panel["across"], fontsize=8)
    axes.set_ylabel(panel["value"], fontsize=8)
    axes.legend(fontsize=7)


def _errors(series: Mapping[str, Any]) -> list[float] | None:
    if series["errors"] is None or not any(series["errors"]):
        return None
    return [error or 0.0 for error in series["errors"]]


SOURCE = "the file that `python -m benchmarks.studies paper` writes, such as runs/paper-table-1/table-panels.json"
PARSER = plot_parser("Plot one of the paper's tables or figures.", "panels", SOURCE)

if __name__ == "__main__":
    run_command(PARSER, lambda args: draw(*read_panels(args.panels), args.plot))
