"""Curves of cost against size: what they hold, and how their points are measured in turn."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from time import perf_counter
from typing import Any

Sampler = Callable[[], float]  # takes one measurement
Clock = Callable[[], float]
Progress = Callable[[str], None]


def figure(value: float) -> str:
    """A measurement for people: three places that count, none behind the point from a thousand on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


@dataclass(frozen=True)
class Effort:
    """How often every point of a curve is measured.

    Attributes:
        fewest, most: rounds over all points.
        patience: seconds after which the fewest must do.
    """

    fewest: int
    most: int
    patience: float


@dataclass(frozen=True)
class Point:
    """One size: the median of its measurements and their quartiles."""

    size: int
    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, size: int, samples: list[float]) -> "Point":
        """The figures of one measurement or more."""
        low, middle, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return cls(size, middle, low, high, len(samples))


@dataclass(frozen=True)
class Line:
    """One thing that is measured at growing sizes."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Curve:
    """What becomes of something as one size grows.

    Attributes:
        title: what is measured.
        size: what the sizes count.
        unit: of the measurements.
        lines: one or more.
        also: further whole numbers by their name and size.
    """

    title: str
    size: str
    unit: str
    lines: tuple[Line, ...]
    also: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The ends of every line in words."""
        return "; ".join(f"{line.name}: {self._ends(line)}" for line in self.lines) + "."

    def _ends(self, line: Line) -> str:
        first, last = line.points[0], line.points[-1]
        growth = f", {last.median / first.median:.2f} times as much" if first.median else ""
        begin, end = figure(first.median), figure(last.median)
        return f"{begin} {self.unit} at {first.size:,}, {end} at {last.size:,}{growth}"

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; the sizes of `also` become texts."""
        return asdict(self) | {"sentence": self.sentence}


def measured(
    samplers: Mapping[tuple[str, int], Sampler], effort: Effort, progress: Progress, clock: Clock = perf_counter
) -> tuple[Line, ...]:
    """Take every measurement once untimed, then all of them in turn, round after round, each round from another on.

    So noise from outside and what the machine does as it warms up hit all points of a curve alike.

    Args:
        samplers: by the name of their line and their size.
        effort: how many rounds.
        progress: told which measurement comes next.
        clock: seconds.
    """
    found: dict[tuple[str, int], list[float]] = {key: [] for key in samplers}
    for (name, size), sample in samplers.items():
        progress(f"warming up: {name} at {size:,}")
        sample()
    keys, began = list(samplers), clock()
    for number in range(effort.most):
        if number >= effort.fewest and clock() - began > effort.patience:
            break
        first = number % len(keys)
        for name, size in keys[first:] + keys[:first]:
            progress(f"round {number + 1}: {name} at {size:,}")
            found[name, size].append(samplers[name, size]())
    return _lines(found)


def _lines(found: Mapping[tuple[str, int], list[float]]) -> tuple[Line, ...]:
    names = dict.fromkeys(name for name, _ in found)
    return tuple(
        Line(name, tuple(Point.of(size, samples) for (of, size), samples in found.items() if of == name))
        for name in names
    )
