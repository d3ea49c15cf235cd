"""Curves of cost over size, and the measurement of their points in turn."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from time import perf_counter
from typing import Any

from pipeline.run.rounds import rotate

Sampler = Callable[[], float]  # takes one measurement
Clock = Callable[[], float]
Progress = Callable[[str], None]


def format_number(value: float) -> str:
    """Format a measurement with three significant digits, without decimals from a thousand on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


@dataclass(frozen=True)
class Effort:
    """Number of rounds in which all points of a curve are measured.

    Attributes:
        fewest, most: minimum and maximum number of rounds.
        seconds: seconds after which only the minimum is completed.
    """

    fewest: int
    most: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """Median and quartiles of the `repeats` measurements at one size."""

    size: int
    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def from_samples(cls, size: int, samples: list[float]) -> "Point":
        """Median and quartiles of one sample or more."""
        low, middle, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return cls(size, middle, low, high, len(samples))


@dataclass(frozen=True)
class Line:
    """Measurements of one quantity at growing sizes."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Curve:
    """Measured quantities as one size grows.

    Attributes:
        title: title of the curve.
        size: name of the size.
        unit: unit of the measurements.
        lines: one line per quantity, at least one.
        also: additional counts, by name and size.
    """

    title: str
    size: str
    unit: str
    lines: tuple[Line, ...]
    also: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """A sentence with the first and last value of every line."""
        return "; ".join(f"{line.name}: {self._ends(line)}" for line in self.lines) + "."

    def _ends(self, line: Line) -> str:
        first, last = line.points[0], line.points[-1]
        growth = f", {last.median / first.median:.2f} times as much" if first.median else ""
        begin, end = format_number(first.median), format_number(last.median)
        return f"{begin} {self.unit} at {first.size:,}, {end} at {last.size:,}{growth}"

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; the sizes in `also` become strings."""
        return asdict(self) | {"sentence": self.sentence}


def measure_lines(
    samplers: Mapping[tuple[str, int], Sampler], effort: Effort, progress: Progress, clock: Clock = perf_counter
) -> tuple[Line, ...]:
    """Measure all points in turn, in rounds that start at different points, after one unmeasured warm-up each.

    Noise of the machine therefore affects all points of a curve alike.

    Args:
        samplers: functions that take one measurement, by name of their line and size.
        effort: number of rounds.
        progress: called with a description of each measurement.
        clock: returns seconds.
    """
    found: dict[tuple[str, int], list[float]] = {key: [] for key in samplers}
    for (name, size), sample in samplers.items():
        progress(f"warming up: {name} at {size:,}")
        sample()
    keys, began = list(samplers), clock()
    for number in range(effort.most):
        if number >= effort.fewest and clock() - began > effort.seconds:
            break
        for name, size in rotate(keys, number):
            progress(f"round {number + 1}: {name} at {size:,}")
            found[name, size].append(samplers[name, size]())
    return _lines(found)


def _lines(found: Mapping[tuple[str, int], list[float]]) -> tuple[Line, ...]:
    names = dict.fromkeys(name for name, _ in found)
    return tuple(
        Line(name, tuple(Point.from_samples(size, samples) for (of, size), samples in found.items() if of == name))
        for name in names
    )
