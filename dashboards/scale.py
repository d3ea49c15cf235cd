"""Cost as work grows, as a picture: `python -m dashboards.scale scale.json scale.png`, from `omnidraft bench-scale`.

One panel per curve, both axes logarithmic, so that what grows in proportion is a straight line. Bars reach from the
lower to the upper quartile. Colours are told apart by colour-blind people, and every line has a mark of its own.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.errors import CorruptError, RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, with marks.
STYLES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"))
COLUMNS = 2
NARROWEST = 8  # largest by smallest value of an axis at least, so that noise does not look like growth
Curves = Mapping[str, Any]


def read_curves(path: Path) -> dict[str, Any]:
    """The curves of a file.

    Raises:
        RunError: there is no such file, or it has no curves.
        CorruptError: it is no file of curves.
    """
    try:
        curves = dict(json.loads(path.read_bytes())["curves"])
        for curve in curves.values():
            _ = curve["title"], curve["size"], curve["unit"], [_values(line["points"]) for line in curve["lines"]]
    except OSError as error:
        message = f"{path} must be a file of curves: {error.strerror}; `omnidraft bench-scale --json FILE` makes one"
        raise RunError(message) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} must be a file of curves, but cannot be understood: {error!r}") from error
    if not curves:
        raise RunError(f"{path} must hold at least one curve, but has none; run `omnidraft bench-scale --json FILE`")
    return curves


def draw(curves: Curves, picture: Path) -> None:
    """Write the picture; its suffix decides the format (png, svg, pdf)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(5.5 * columns, 3.8 * rows), squeeze=False)
    for axes, curve in zip(panels.flat, curves.values(), strict=False):
        _panel(axes, curve)
    for axes in panels.flat[len(curves) :]:
        axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _panel(axes: "Axes", curve: Mapping[str, Any]) -> None:
    """One curve's lines over its sizes."""
    from matplotlib.ticker import LogLocator

    for (color, marker), line in zip(STYLES * len(curve["lines"]), curve["lines"], strict=False):
        sizes, values, below, above = _values(line["points"])
        axes.errorbar(
            sizes, values, (below, above), color=color, marker=marker, markersize=4, capsize=2, label=line["name"]
        )
    sizes = sorted({point["size"] for line in curve["lines"] for point in line["points"]})
    # Where a size is zero the axis is linear up to the first that is not.
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
    """Sizes, medians, and how far the quartiles lie below and above them."""
    return (
        [point["size"] for point in points],
        [point["median"] for point in points],
        [point["median"] - point["low"] for point in points],
        [point["high"] - point["median"] for point in points],
    )


def main() -> None:
    """Read the arguments and write the picture."""
    parser = argparse.ArgumentParser(description="Draw cost as work grows.")
    parser.add_argument("curves", type=Path, help="the file that `omnidraft bench-scale --json` writes")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    arguments = parser.parse_args()
    draw(read_curves(arguments.curves), arguments.picture)


if __name__ == "__main__":
    main()
