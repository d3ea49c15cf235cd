"""A comparison as people read it: a table and one sentence."""

from collections.abc import Iterator

from pipeline.compare import Comparison
from pipeline.compare_figures import FEWEST, INTERVAL, SPEED, Paired

_NAMES = {
    "acceptance_rate": "acceptance (accepted / judged)",
    "mean_accepted_length": "accepted tokens per drafted pass",
    "block_efficiency": "tokens per target pass",
    SPEED: "tokens per second",
}


def heads(comparison: Comparison) -> tuple[str, ...]:
    """Of the table's columns."""
    return ("", *comparison.sides, "change", f"{INTERVAL:.0%} interval")


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table, row by row."""
    return [(_NAMES[name], *_cells(name, figure)) for name, figure in comparison.figures.items()]


def _cells(name: str, figure: Paired) -> tuple[str, ...]:
    digits, sign = (1, "") if name == SPEED else (3, "+")
    sides = tuple("-" if value is None else f"{value:.{digits}f}" for value in (figure.first, figure.second))
    unit = "x" if name == SPEED else ""
    change = "-" if figure.change is None else f"{figure.change:{sign}.3f}{unit}"
    known = figure.low is not None and figure.high is not None
    return (*sides, change, f"{figure.low:{sign}.3f} to {figure.high:{sign}.3f}" if known else "-")


def sentences(comparison: Comparison) -> Iterator[str]:
    """What the table says of the acceptance and, greedy, of the texts."""
    first, second = comparison.sides
    figure, count = comparison.figures["acceptance_rate"], len(comparison.prompts)
    on = f"on {count} prompt{'s' if count > 1 else ''}"
    if figure.change is None:
        yield f"Nothing was judged on one side {on}: the acceptance cannot be compared."
    elif count < FEWEST:
        yield f"Too few prompts for an interval: {count}, and it takes {FEWEST} or more."
    elif figure.low is None or figure.high is None:
        yield f"Too little was judged on one side {on}: the change of acceptance has no interval."
    elif figure.low <= 0 <= figure.high:
        yield f"No difference of acceptance between {first} and {second} can be told {on}."
    else:
        more = "more" if figure.change > 0 else "less"
        yield f"{second} accepts {more} than {first}: {figure.change:+.3f} of the judged tokens, {on}."
    if comparison.settings["sampling"]["temperature"] == 0:
        yield "The texts are the same on both sides, token for token."
