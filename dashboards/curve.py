"""The acceptance curve of one run as a picture: `python -m dashboards.curve RUN curve.png`.

Acceptance and block efficiency per window of prompts, with the datasets, drift marks and versions along the stream.
Colours are told apart by colour-blind people, and every mark has a shape of its own.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from store.errors import OmnidraftError
from store.queries import LogReader

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
WINDOW = 20  # prompts of one point
MOST_NUMBERS = 60  # versions that are numbered in the picture


@dataclass(frozen=True)
class Curve:
    """What is drawn.

    Attributes:
        offsets: the last stream offset of each window.
        acceptance: accepted / judged in each window.
        efficiency: emitted target tokens per target forward in each window.
        datasets: name and first offset of each dataset.
        drifts: offsets of the alarms that were acted upon.
        versions: offset and number of each published version.
    """

    offsets: Sequence[int]
    acceptance: Sequence[float]
    efficiency: Sequence[float]
    datasets: Sequence[tuple[str, int]]
    drifts: Sequence[int]
    versions: Sequence[tuple[int, int]]


_WINDOWS = """
    WITH numbered AS (
        SELECT *, (row_number() OVER (PARTITION BY dataset ORDER BY "offset") - 1) // {window} AS part FROM prompts
    )
    SELECT max("offset") AS last, sum(accepted) / nullif(sum(judged), 0) AS acceptance,
           sum(emitted) / sum(blocks) AS efficiency
    FROM numbered GROUP BY dataset, part ORDER BY last
"""

_DRIFTS = """SELECT "offset" AS at FROM drifts WHERE action IN ('reset', 'recall') ORDER BY 1"""


def read_curve(run_folder: Path, window: int = WINDOW) -> Curve:
    """The curve of a run's committed log, windows of `window` prompts of one dataset."""
    with LogReader([run_folder]) as log:
        windows = log.select(_WINDOWS.format(window=window)).to_pydict()
        datasets = log.select('SELECT dataset, min("offset") AS first FROM prompts GROUP BY 1 ORDER BY 2').to_pylist()
        drifts = log.select(_DRIFTS).to_pydict()
        versions = log.select('SELECT "offset" AS at, version FROM versions ORDER BY seq').to_pylist()
    return Curve(
        windows["last"],
        [float("nan") if rate is None else rate for rate in windows["acceptance"]],
        windows["efficiency"],
        [(row["dataset"], row["first"]) for row in datasets],
        drifts["at"],
        [(row["at"], row["version"]) for row in versions],
    )


def draw(curve: Curve, picture: Path, title: str) -> None:
    """Write the picture; its suffix decides the format (png, svg, pdf)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 5.5), layout="constrained")
    above.plot(curve.offsets, curve.acceptance, color=BLUE, marker="o", markersize=3)
    above.set(ylabel="acceptance rate\n(accepted / judged)", ylim=(0, 1))
    above.set_title(title, loc="left", fontweight="bold", parse_math=False)
    below.plot(curve.offsets, curve.efficiency, color=BLUE, marker="s", markersize=3)
    below.set(
        ylabel="block efficiency\n(tokens / target forward)", xlabel="prompt (offset in the stream)", ylim=(1, None)
    )
    _mark(above, curve)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        for at in curve.drifts:
            axes.axvline(at, color=ORANGE, linestyle="--", linewidth=1)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _mark(axes: "Axes", curve: Curve) -> None:
    for name, first in curve.datasets:
        axes.axvline(first, color=GREY, linewidth=0.8)
        axes.text(first, 0.97, f" {name}", color=GREY, va="top", parse_math=False)
    places = {"drift, acted upon": (curve.drifts, 1.0), "version": ([at for at, _ in curve.versions], 0.0)}
    looks = {"drift, acted upon": ("v", ORANGE, 10), "version": ("^", "black", 5)}
    for name, (offsets, height) in places.items():
        if not offsets:
            continue
        marker, color, size = looks[name]
        heights = [height] * len(offsets)  # on the frame, where no curve is
        axes.plot(offsets, heights, marker, color=color, markersize=size, label=name, clip_on=False, zorder=3)
    for at, version in curve.versions if len(curve.versions) <= MOST_NUMBERS else ():
        axes.annotate(str(version), (at, 0.03), ha="center", fontsize=7)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)


def main() -> None:
    """Read the arguments and write the picture."""
    parser = argparse.ArgumentParser(description="Draw the acceptance curve of a run.")
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    parser.add_argument("--window", type=int, default=WINDOW, help="prompts of one point (default %(default)s)")
    arguments = parser.parse_args()
    try:
        draw(read_curve(arguments.run, arguments.window), arguments.picture, arguments.run.resolve().name)
    except (OmnidraftError, OSError) as error:
        sys.exit(f"omnidraft: {error}")


if __name__ == "__main__":
    main()
