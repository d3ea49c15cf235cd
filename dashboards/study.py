"""A study as a picture, from the file that it keeps: `python -m dashboards.study runs/study-cache.json cache.png`.

The study of the cache becomes curves over the cache's size; any other becomes one mark per arm. Bars are standard
errors over seeds. Colours are told apart by colour-blind people, and every mark has a shape of its own.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.errors import CorruptError, RunError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
KIB = 1024
FIGURES = {
    "acceptance": "acceptance rate\n(accepted / judged)",
    "block_efficiency": "block efficiency\n(tokens / target forward)",
}
Arms = Mapping[str, Any]


def read_figures(path: Path) -> tuple[str, dict[str, Arms]]:
    """The study's name, and its figures per target and arm.

    Raises:
        RunError: there is no such file, or the study has no figures yet.
        CorruptError: it is no study.
    """
    try:
        content = json.loads(path.read_bytes())
        name, figures = str(content["settings"]["study"]), dict(content["figures"])
    except OSError as error:
        raise RunError(f"{path} must be the file of a study: {error.strerror}; `omnidraft study` makes one") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} must be the file of a study, but cannot be understood: {error!r}") from error
    if not figures:
        raise RunError(f"{path} must hold a finished study, but has no figures yet; run the same command to its end")
    return name, figures


def draw(name: str, figures: Mapping[str, Arms], picture: Path) -> None:
    """Write the picture, a row of two panels per target; its suffix decides the format (png, svg, pdf)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 3.6 if name == "cache" else 1.2 + 0.3 * max(map(len, figures.values()))
    figure, panels = pyplot.subplots(
        len(figures), 2, figsize=(11, height * len(figures)), squeeze=False, layout="constrained"
    )
    for row, (target, arms) in zip(panels, figures.items(), strict=True):
        for axes, (key, label) in zip(row, FIGURES.items(), strict=True):
            _by_size(axes, arms, key, label) if name == "cache" else _by_arm(axes, arms, key, label)
            axes.set_title(target, fontsize=9)
            axes.grid(alpha=0.25)
    figure.suptitle(f"study {name}: last fifth of the stream")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _by_size(axes: "Axes", arms: Arms, key: str, label: str) -> None:
    """A curve per policy over the cache's size at the end, from none to the full one."""
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
    """One mark per arm, the first at the top."""
    values, errors = zip(*(_value(found["last_fifth"][key]) for found in arms.values()), strict=True)
    places = range(len(arms))
    axes.errorbar(values, places, xerr=errors, color=BLUE, marker="o", linestyle="none", capsize=3)
    axes.set_yticks(places, list(arms), fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=label)


def _value(estimate: Mapping[str, Any] | None) -> tuple[float, float]:
    """Mean and standard error; what is not there is not drawn."""
    if estimate is None:
        return float("nan"), 0.0
    return estimate["value"], estimate["error"] or 0.0


def main() -> None:
    """Read the arguments and write the picture."""
    parser = argparse.ArgumentParser(description="Draw a study.")
    parser.add_argument("study", type=Path, help="the file that `omnidraft study` keeps, such as runs/study-cache.json")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    arguments = parser.parse_args()
    draw(*read_figures(arguments.study), arguments.picture)


if __name__ == "__main__":
    main()
