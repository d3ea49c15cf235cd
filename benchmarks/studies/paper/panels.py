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
    """One curve, or one mark per category.

    Attributes:
        name: in the legend.
        values: y of a curve by `at`; of categories the mark of each, None where there is none.
        at: x of a curve, in rising order; empty for categories.
        errors: standard errors of the values; None for a single seed.
        is_paper: whether the values are the paper's.
    """

    name: str
    values: Sequence[float | None]
    at: Sequence[float] = ()
    errors: Sequence[float | None] | None = None
    is_paper: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        title: above it.
        value: label of the values' axis.
        series: what it shows.
        across: label of the other axis of curves.
        categories: names, if it has one mark per category.
        marks: what happened at which x of the curves.
        is_logarithmic: whether both axes are logarithmic.
    """

    title: str
    value: str
    series: Sequence[Series]
    across: str = ""
    categories: Sequence[str] = ()
    marks: Mapping[str, float] | None = None
    is_logarithmic: bool = False


@dataclass(frozen=True)
class PlotFile:
    """All panels of a table or figure, and how they were measured.

    Attributes:
        title: such as `Table 1: losses on four tasks`.
        remark: how to read it.
        command: that measured it.
        date: when, as `2026-11-23`.
        panels: the plots.
        measured: models, numbers of prompts and seeds; a sentence each.
    """

    title: str
    remark: str
    command: str
    date: str
    panels: Sequence[Panel]
    measured: Sequence[str] = ()

    def write(self, folder: Path, name: str) -> Path:
        """Write the file of panels `NAME-panels.json` into the folder of the runs, atomically, and return its path."""
        path = folder / f"{name}-{PANELS}"
        write_whole(path, (json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n").encode())
        return path
