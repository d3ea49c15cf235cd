"""A loaded server over time, as a picture: `python -m dashboards.load load.json load.png`.

The file is that of `omnidraft bench-serve --json`. Acceptance, tokens per target pass and per second, memory, and what
waits have a panel each.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from store.errors import CorruptError, OmnidraftError, RunError

BLUE, ORANGE = "#0072b2", "#d55e00"
POINTS = 60  # of a line at most
NAN = float("nan")
Sample = Mapping[str, Any]
Line = Sequence[tuple[float, float]]  # seconds and values


def read_samples(path: Path) -> list[Sample]:
    """How the server stood, sample by sample.

    Raises:
        RunError: there is no such file, or it has less than two samples.
        CorruptError: it is no file of a load.
    """
    try:
        samples = list(json.loads(path.read_bytes())["samples"])
        for sample in samples:
            _ = sample["at"], sample["figures"], sample["memory"]
    except OSError as error:
        message = f"{path} must be a file of a load: {error.strerror}; `omnidraft bench-serve --json FILE` makes one"
        raise RunError(message) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} must be a file of a load, but cannot be understood: {error!r}") from error
    if len(samples) < 2:
        raise RunError(f"{path} must have two samples at least, got {len(samples)}; load for longer")
    return samples


def per(samples: Sequence[Sample], above: str, below: str | None = None) -> Line:
    """By how much a counter grew over how much another did, or over the seconds; at the middle of each interval."""
    return list(_grown(samples[:: -(-len(samples) // POINTS)], above, below))


def _grown(samples: Sequence[Sample], above: str, below: str | None) -> Iterator[tuple[float, float]]:
    for before, after in pairwise(samples):
        if above in after["figures"]:
            span = after["at"] - before["at"] if below is None else _of(after, below) - _of(before, below)
            grown = _of(after, above) - _of(before, above)
            yield (before["at"] + after["at"]) / 2, grown / span if span else NAN


def _of(sample: Sample, name: str) -> float:
    return float(sample["figures"].get(name, 0.0))


def plain(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> Line:
    """A figure as it stood."""
    return [(sample["at"], found) for sample in samples if (found := value(sample)) is not None]


def panels_of(samples: Sequence[Sample]) -> dict[str, dict[str, Line]]:
    """Lines by name, by the unit of their panel; those that the server has figures for."""
    all_panels = {
        "acceptance": {
            "accepted / proposed, with lookups": per(samples, "accepted", "proposed"),
            "of the drafter model, lately": plain(samples, lambda one: one["figures"].get("model_acceptance")),
        },
        "tokens per target pass": {"tokens": per(samples, "emitted", "blocks")},
        "tokens per second": {"tokens": per(samples, "generated")},
        "resident memory, MB": {"memory": plain(samples, lambda one: one["memory"] and one["memory"] / 1e6)},
        "waiting": {
            "requests": plain(samples, lambda one: one["figures"].get("waiting")),
            "prompts before the learner": plain(samples, lambda one: one["figures"].get("learner_lag")),
        },
    }
    filled = {unit: {name: line for name, line in lines.items() if line} for unit, lines in all_panels.items()}
    return {unit: lines for unit, lines in filled.items() if lines}


def draw(samples: Sequence[Sample], picture: Path) -> None:
    """Write the picture; its suffix decides the format (png, svg, pdf)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = panels_of(samples)
    if not panels:
        raise RunError("the server must have told something or be of this machine, but there is nothing to draw")
    size = (10, 2.2 * len(panels))
    figure, rows = pyplot.subplots(len(panels), 1, sharex=True, figsize=size, layout="constrained", squeeze=False)
    for axes, (unit, lines) in zip(rows[:, 0], panels.items(), strict=True):
        for color, style, (name, line) in zip((BLUE, ORANGE), ("-", "--"), lines.items(), strict=False):
            axes.plot(*zip(*line, strict=True), style, color=color, label=name)
        axes.set(ylabel=unit, ylim=(0, None))
        axes.grid(alpha=0.25)
        if len(lines) > 1:
            axes.legend(fontsize=8, frameon=False)
    rows[-1, 0].set_xlabel("seconds")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Read the arguments and write the picture."""
    parser = argparse.ArgumentParser(description="Draw a loaded server over time.")
    parser.add_argument("load", type=Path, help="the file that `omnidraft bench-serve --json` writes")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    arguments = parser.parse_args()
    try:
        draw(read_samples(arguments.load), arguments.picture)
    except (OmnidraftError, OSError) as error:
        sys.exit(f"omnidraft: {error}")


if __name__ == "__main__":
    main()
