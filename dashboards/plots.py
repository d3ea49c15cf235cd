"""Shared parts of the commands of this package: arguments, and plots with panels."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.errors import OmnidraftError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can distinguish.
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"


@contextmanager
def panels(path: Path, rows: int = 1, columns: int = 1, **settings: Any) -> Iterator[tuple["Figure", Any]]:
    """Yield a plot and its array of panels; write the plot on exit in the format of the file's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plot, axes = pyplot.subplots(rows, columns, squeeze=False, **settings)
    try:
        yield plot, axes
        plot.savefig(path, dpi=110)
    finally:
        pyplot.close(plot)


def plot_parser(description: str, source: str, source_help: str) -> ArgumentParser:
    """Make the parser of a command that plots a source to a file."""
    parser = ArgumentParser(description=description)
    parser.add_argument(source, type=Path, help=source_help)
    parser.add_argument("plot", type=Path, help="file to write: .png, .svg or .pdf")
    return parser


def run_command(parser: ArgumentParser, work: Callable[[Namespace], object], misuse: int = 1) -> None:
    """Run a command with its arguments. Errors are printed in one line; the exit status is 1, or `misuse` for a
    `UsageError`.
    """
    arguments = parser.parse_args()
    try:
        work(arguments)
    except (OmnidraftError, OSError) as error:
        print(f"omnidraft: {error}", file=sys.stderr)
        sys.exit(misuse if isinstance(error, UsageError) else 1)
