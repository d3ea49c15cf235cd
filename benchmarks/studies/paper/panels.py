"""Plots of the paper's tables and figures as data: panels of series, which `dashboards` draws.

A file `...-panels.json` next to the runs has them, with title, command and date. A panel with `categories` has one mark
per category and series; any other panel has one curve per series.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from store.files import write_whole

PANELS = "panels.json"


@dataclass(frozen=True)
class Series:
    """One curve, or one mark per category."""

    name: str  # in the legend
    values: Sequence[float | None]  # y of a curve by `at`; of categories the mark of each, None where there is none
    at: Sequence[float] = ()  # x of a curve, in rising order; empty for categories
    errors: Sequence[float | None] | None = None  # standard errors of the values; None for a single seed
    is_paper: bool = False  # whether the values are the paper's


@dataclass(frozen=True)
class Panel:
    """One plot."""

    title: str  # above it
    value: str  # label of the values' axis
    series: Sequence[Series]  # what it shows
    across: str = ""  # label of the other axis of curves
    categories: Sequence[str] = ()  # names, if it has one mark per category
    marks: Mapping[str, float] | None = None  # what happened at which x of the curves
    is_logarithmic: bool = False  # whether both axes are logarithmic


@dataclass(frozen=True)
class PlotFile:
    """All panels of a table or figure, and how they were measured."""

    title: str  # such as `Table 1: losses on four tasks`
    remark: str  # how to read it
    command: str  # that measured it
    date: str  # when, as `2026-11-23`
    panels: Sequence[Panel]  # the plots
    measured: Sequence[str] = ()  # models, numbers of prompts and seeds; a sentence each

    def write(self, folder: Path, name: str) -> Path:
        """Write the file of panels `NAME-panels.json` into the folder of the runs, atomically, and return its path."""
        path = folder / f"{name}-{PANELS}"
        write_whole(path, (json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n").encode())
        return path
