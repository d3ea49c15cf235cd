"""Plots curves with quartiles over a size.

One panel per curve with logarithmic axes, so that proportional growth is a straight line. Bars reach from the lower to
the upper quartile. Each line has its own marker.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashboards.plots import BLUE, GREEN, ORANGE, PINK, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PINK, "D"))
COLUMNS = 2
NARROWEST = 8  # minimum ratio of largest to smallest value of an axis, so that noise does not look like growth
Curves = Mapping[str, Any]


def draw(curves: Curves, path: Path) -> None:
    """Write the plot; the suffix of the file determines its format (png, svg, pdf)."""
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    with panels(path, rows, columns, figsize=(5.5 * columns, 3.8 * rows)) as (plot, grid):
        for axes, curve in zip(grid.flat, curves.values(), strict=False):
            _panel(axes, curve)
        for axes in grid.flat[len(curves) :]:
            axes.set_visible(False)
        plot.tight_layout()


def _panel(axes: "Axes", curve: Mapping[str, Any]) -> None:
    """Plot the lines of one curve over its sizes."""
    from matplotlib.ticker import LogLocator

    for (color, marker), line in zip(STYLES * len(curve["lines"]), curve["lines"], strict=False):
        sizes, values, below, above = _values(line["points"])
        axes.errorbar(
            sizes, values, (below, above), color=color, marker=marker, markersize=4, capsize=2, label=line["name"]
        )
    sizes = sorted({point["size"] for line in curve["lines"] for point in line["points"]})
    # With a size of zero the axis is linear up to the first size above zero.
    first = next((size for size in sizes if size), 1)
    axes.set_xscale("symlog", linthresh=first) if 0 in sizes else axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    missing = max(1.0, NARROWEST * low / high) ** 0.5
    axes.set_ylim(low / missing, high * missing)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set(xlabel=curve["size"], ylabel=curve["unit"])
    axes.set_title(curve["title"], fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7)


def _values(points: list[Mapping[str, float]]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Sizes, medians, and distances of the lower and upper quartiles from the medians."""
    return (
        [point["size"] for point in points],
        [point["median"] for point in points],
        [point["median"] - point["low"] for point in points],
        [point["high"] - point["median"] for point in points],
    )
