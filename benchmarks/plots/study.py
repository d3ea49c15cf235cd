"""Plots a study from its file: `python -m benchmarks.plots.study runs/study-cache.json cache.png`.

The study of the cache becomes curves over the cache's size; any other study becomes one mark per arm. Bars are
standard errors over seeds. Each kind of mark has its own shape.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plots.results import read_json
from dashboards.plots import BLUE, ORANGE, panels, plot_parser, run_command
from store.errors import RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIB = 1024
METRICS = {
    "acceptance": "acceptance rate\n(accepted / judged)",
    "block_efficiency": "block efficiency\n(tokens / target forward)",
}
Arms = Mapping[str, Any]


def read_results(path: Path) -> tuple[str, dict[str, Arms]]:
    """Read the name of a study, and its results by target and arm.

    Raises:
        RunError: there is no such file, or the study is not finished.
        CorruptError: the file is not that of a study.
    """
    name, results = read_json(path, "the file of a study", "python -m benchmarks.studies", _parse_results)
    if not results:
        raise RunError(f"{path} must hold a finished study, but has no results yet; run the same command to its end")
    return name, results


def _parse_results(content: Any) -> tuple[str, dict[str, Arms]]:
    return str(content["settings"]["study"]), dict(content["figures"])


def draw(name: str, results: Mapping[str, Arms], path: Path) -> None:
    """Write the plot with two panels per target; the suffix of the file determines its format (png, svg, pdf)."""
    height = 3.6 if name == "cache" else 1.2 + 0.3 * max(map(len, results.values()))
    size = (11, height * len(results))
    with panels(path, len(results), 2, figsize=size, layout="constrained") as (plot, grid):
        for row, (target, arms) in zip(grid, results.items(), strict=True):
            for axes, (key, label) in zip(row, METRICS.items(), strict=True):
                _by_size(axes, arms, key, label) if name == "cache" else _by_arm(axes, arms, key, label)
                axes.set_title(target, fontsize=9)
                axes.grid(alpha=0.25)
        plot.suptitle(f"study {name}: last fifth of the stream")


def _by_size(axes: "Axes", arms: Arms, key: str, label: str) -> None:
    """Plot a curve per eviction rule over the size of the cache at the end, from no cache to the full one."""
    for policy, color, marker in (("LRU", ORANGE, "s"), ("LFU", BLUE, "o")):
        on_curve = [arm for arm in arms if arm in ("none", "full") or arm.endswith(policy)]
        points = [
            (_value(arms[arm]["cache_bytes"])[0] / KIB, *_value(arms[arm]["last_fifth"][key])) for arm in on_curve
        ]
        sizes, values, errors = zip(*sorted(points), strict=True)
        axes.errorbar(sizes, values, errors, color=color, marker=marker, markersize=5, capsize=3, label=policy)
    axes.set(xlabel="n-gram cache, KiB", ylabel=label)
    axes.legend(fontsize=8)


def _by_arm(axes: "Axes", arms: Arms, key: str, label: str) -> None:
    """Plot one mark per arm, the first arm at the top."""
    values, errors = zip(*(_value(found["last_fifth"][key]) for found in arms.values()), strict=True)
    places = range(len(arms))
    axes.errorbar(values, places, xerr=errors, color=BLUE, marker="o", linestyle="none", capsize=3)
    axes.set_yticks(places, list(arms), fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=label)


def _value(estimate: Mapping[str, Any] | None) -> tuple[float, float]:
    """Mean and standard error; NaN and 0 for a missing estimate, which is not drawn."""
    if estimate is None:
        return float("nan"), 0.0
    return estimate["value"], estimate["error"] or 0.0


SOURCE = "the file that `python -m benchmarks.studies` writes, such as runs/study-cache.json"
PARSER = plot_parser("Plot a study.", "study", SOURCE)

if __name__ == "__main__":
    run_command(PARSER, lambda args: draw(*read_results(args.study), args.plot))
