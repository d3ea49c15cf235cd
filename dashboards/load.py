"""Plots a server under load over time: `python -m dashboards.load load.json load.png`.

The input is the file of `omnidraft bench-serve --json`. Acceptance, tokens per target pass, tokens per second, memory
and queues have a panel each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dashboards.plots import BLUE, ORANGE, panels, plot_parser, read_json, run_command
from store.errors import RunError

POINTS = 60  # maximum points of a line
NAN = float("nan")
METRICS = "figures"  # key of the metrics in a sample of the file
Sample = Mapping[str, Any]
Line = Sequence[tuple[float, float]]  # pairs of seconds and value


def read_samples(path: Path) -> list[Sample]:
    """Read the samples of the server from a file.

    Raises:
        RunError: there is no such file, or it has less than two samples.
        CorruptError: the file is not that of a load.
    """
    samples = read_json(path, "a file of a load", "omnidraft bench-serve --json FILE", _samples)
    if len(samples) < 2:
        raise RunError(f"{path} must have two samples at least, got {len(samples)}; load for longer")
    return samples


def _samples(content: Any) -> list[Sample]:
    samples = list(content["samples"])
    for sample in samples:
        _ = sample["at"], sample[METRICS], sample["memory"]
    return samples


def counter_rate(samples: Sequence[Sample], above: str, below: str | None = None) -> Line:
    """Growth of the counter `above` per growth of `below`, or per second, at the middle of each interval."""
    return list(_rates(samples[:: -(-len(samples) // POINTS)], above, below))


def _rates(samples: Sequence[Sample], above: str, below: str | None) -> Iterator[tuple[float, float]]:
    for before, after in pairwise(samples):
        if above in after[METRICS]:
            span = after["at"] - before["at"] if below is None else _counter(after, below) - _counter(before, below)
            grown = _counter(after, above) - _counter(before, above)
            yield (before["at"] + after["at"]) / 2, grown / span if span else NAN


def _counter(sample: Sample, name: str) -> float:
    return float(sample[METRICS].get(name, 0.0))


def sample_values(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> Line:
    """Value of each sample that has one."""
    return [(sample["at"], found) for sample in samples if (found := value(sample)) is not None]


def panels_of(samples: Sequence[Sample]) -> dict[str, dict[str, Line]]:
    """Lines by name, by the unit of their panel. Lines and panels without data are left out."""
    all_panels = {
        "acceptance": {
            "accepted / proposed, with lookups": counter_rate(samples, "accepted", "proposed"),
            "of the drafter model, recent": sample_values(samples, lambda one: one[METRICS].get("model_acceptance")),
        },
        "tokens per target pass": {"tokens": counter_rate(samples, "emitted", "blocks")},
        "tokens per second": {"tokens": counter_rate(samples, "generated")},
        "resident memory, MB": {"memory": sample_values(samples, lambda one: one["memory"] and one["memory"] / 1e6)},
        "waiting": {
            "requests": sample_values(samples, lambda one: one[METRICS].get("waiting")),
            "prompts waiting for the learner": sample_values(samples, lambda one: one[METRICS].get("learner_lag")),
        },
    }
    filled = {unit: {name: line for name, line in lines.items() if line} for unit, lines in all_panels.items()}
    return {unit: lines for unit, lines in filled.items() if lines}


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Write the plot; the suffix of the file determines its format (png, svg, pdf).

    Raises:
        RunError: the samples have no metrics and no memory.
    """
    if not (units := panels_of(samples)):
        raise RunError(
            "the samples must have metrics or memory of the server, but have neither; load a server with /metrics"
        )
    size = (10, 2.2 * len(units))
    with panels(path, len(units), sharex=True, figsize=size, layout="constrained") as (_, rows):
        for axes, (unit, lines) in zip(rows[:, 0], units.items(), strict=True):
            for color, style, (name, line) in zip((BLUE, ORANGE), ("-", "--"), lines.items(), strict=False):
                axes.plot(*zip(*line, strict=True), style, color=color, label=name)
            axes.set(ylabel=unit, ylim=(0, None))
            axes.grid(alpha=0.25)
            if len(lines) > 1:
                axes.legend(fontsize=8, frameon=False)
        rows[-1, 0].set_xlabel("seconds")


SOURCE = "the file that `omnidraft bench-serve --json` writes"
PARSER = plot_parser("Plot a server under load over time.", "load", SOURCE)

if __name__ == "__main__":
    run_command(PARSER, lambda args: draw(read_samples(args.load), args.plot))
