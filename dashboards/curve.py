"""Plots the acceptance curve of one run: `python -m dashboards.curve RUN curve.png`.

The plot shows acceptance rate, with a band for its interval of 95%, and block efficiency per window of 20 prompts or
more, with datasets, drift marks and versions along the stream. Each kind of mark has its own shape.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dashboards.commands import run_command
from store.query.log_reader import LogReader
from store.query.rates import Acceptance

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind people can distinguish.
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
MOST_NUMBERS = 60  # versions up to which the plot shows their numbers


@dataclass(frozen=True)
class Curve:
    """Data of the plot."""

    offsets: Sequence[int]  # last stream offset of each window
    acceptance: Sequence[Acceptance]  # of the drafter model's drafts in each window
    efficiency: Sequence[float]  # emitted target tokens per target forward in each window
    datasets: Sequence[tuple[str, int]]  # name and first offset of each dataset
    drifts: Sequence[int]  # offsets of the alarms with a response
    versions: Sequence[tuple[int, int]]  # offset and number of each published version


def read_curve(run_folder: Path) -> Curve:
    """Read the curve from a run's committed log, in the windows of the recipe `acceptance-over-time`."""
    with LogReader([run_folder]) as log:
        windows = log.recipe("acceptance-over-time").to_pydict()
        datasets = log.select('SELECT dataset, min("offset") AS first FROM prompts GROUP BY 1 ORDER BY 2').to_pylist()
        drifts = log.recipe("drifts").to_pylist()
        versions = log.select('SELECT "offset" AS at, version FROM versions ORDER BY seq').to_pylist()
    return Curve(
        windows["last_offset"],
        [Acceptance(*counts) for counts in zip(windows["accepted"], windows["judged"], strict=True)],
        windows["block_efficiency"],
        [(row["dataset"], row["first"]) for row in datasets],
        [row["offset"] for row in drifts if row["acted_upon"]],
        [(row["at"], row["version"]) for row in versions],
    )


def draw(curve: Curve, path: Path, title: str) -> None:
    """Write the plot; the suffix of the file determines its format (png, svg, pdf)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plot, (above, below) = pyplot.subplots(2, sharex=True, figsize=(10, 5.5), layout="constrained")
    try:
        _draw_acceptance(above, curve)
        above.set(ylabel="acceptance rate\n(accepted / judged)", ylim=(0, 1))
        above.set_title(title, loc="left", fontweight="bold", parse_math=False)
        below.plot(curve.offsets, curve.efficiency, color=BLUE, marker="s", markersize=3)
        below.set(ylabel="block efficiency\n(tokens / target forward)", ylim=(1, None))
        below.set(xlabel="prompt (offset in the stream)")
        _mark(above, curve)
        for axes in (above, below):
            axes.grid(alpha=0.25)
            for at in curve.drifts:
                axes.axvline(at, color=ORANGE, linestyle="--", linewidth=1)
        plot.savefig(path, dpi=110)
    finally:
        pyplot.close(plot)


def _draw_acceptance(axes: "Axes", curve: Curve) -> None:
    """Draw the rates, and their intervals as a band; where nothing was judged, a dotted line to the next rate."""
    none = float("nan")
    rates = [none if one.rate is None else one.rate for one in curve.acceptance]
    intervals = [one.interval or (none, none) for one in curve.acceptance]
    low, high = [low for low, _ in intervals], [high for _, high in intervals]
    axes.fill_between(curve.offsets, low, high, color=BLUE, alpha=0.18, linewidth=0)
    known = [(at, one.rate) for at, one in zip(curve.offsets, curve.acceptance, strict=True) if one.rate is not None]
    if 1 < len(known) < len(rates):
        axes.plot(*zip(*known, strict=True), color=BLUE, linestyle=":", linewidth=1)
    axes.plot(curve.offsets, rates, color=BLUE, marker="o", markersize=3)


def _mark(axes: "Axes", curve: Curve) -> None:
    for name, first in curve.datasets:
        axes.axvline(first, color=GREY, linewidth=0.8)
        axes.text(first, 0.97, f" {name}", color=GREY, va="top", parse_math=False)
    versions = [at for at, _ in curve.versions]
    kinds = (("drift with response", curve.drifts, 1.0, "v", ORANGE, 10), ("version", versions, 0.0, "^", "black", 5))
    for name, offsets, height, marker, color, size in kinds:
        if offsets:
            heights = [height] * len(offsets)  # on the frame, away from the curves
            axes.plot(offsets, heights, marker, color=color, markersize=size, label=name, clip_on=False, zorder=3)
    for at, version in curve.versions if len(curve.versions) <= MOST_NUMBERS else ():
        axes.annotate(str(version), (at, 0.03), ha="center", fontsize=7)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)


PARSER = ArgumentParser(description="Plot the acceptance curve of a run.")
PARSER.add_argument("run", type=Path, help="folder of the run")
PARSER.add_argument("plot", type=Path, help="file to write: .png, .svg or .pdf")

if __name__ == "__main__":
    run_command(PARSER, lambda args: draw(read_curve(args.run), args.plot, args.run.resolve().name))
