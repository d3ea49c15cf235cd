"""Trees of candidates in a completion: the share of its place that each candidate had, and a tree as lines of text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

SOURCES = {"model": "model", "lookup": "own text", "memory": "memory"}
MOST = 40  # lines of one tree; of larger ones only the judged candidates are listed
_MARKS = {"accepted": "✓", "rejected": "✗", "alternative": "–", "unjudged": "·"}
_LEGEND = "✓ accepted  ✗ rejected  – alternative  · not judged"


def is_candidate(row: Row) -> bool:
    """Return True if the decision is about a candidate of a tree."""
    return row["parent"] is not None


def is_listed(row: Row) -> bool:
    """Return True if a candidate is part of the list of its tree alone, not of the text."""
    return is_candidate(row) and row["outcome"] in ("alternative", "unjudged")


def list_siblings(rows: Sequence[Row], row: Row) -> list[Row]:
    """Return the candidates of a candidate's place, in order; nothing for other tokens."""
    return [one for one in rows if is_candidate(row) and one["parent"] == row["parent"]]


def share_of(siblings: Sequence[Row], row: Row) -> tuple[float, float]:
    """Return the range of the uniform number that accepts a candidate: its probability after those before it."""
    before = [one["target_levels"][0] for one in siblings if one["index"] < row["index"]]
    begin = float(sum(before))
    return begin, begin + row["target_levels"][0]


def describe_source(row: Row) -> str:
    """The source of a candidate and what it knew: `memory, 3 tokens matched, seen 2 times, estimated chance 0.4`."""
    if row["drafter"] == "model":
        return f"model, estimated chance {row['chance']:.3g}"
    times = "once" if row["count"] == 1 else f"{row['count']} times"
    length = f"{row['context']} token{'' if row['context'] == 1 else 's'}"
    known = f"{length} matched, seen {times}" if row["context"] is not None else "context not known"
    return f"{SOURCES[row['drafter']]}, {known}, estimated chance {row['chance']:.3g}"


def _describe_match(row: Row) -> str:
    return "" if row["drafter"] == "model" else f" ({row['context']} tokens, {row['count']}×)"


def list_tree(rows: Sequence[Row], text_of: Callable[[Row], str]) -> Iterator[str]:
    """Yield the tree of a block, one candidate per line, indented by its depth; the first line is a title."""
    nodes = [row for row in rows if is_candidate(row)]
    accepted = sum(row["outcome"] == "accepted" for row in nodes)
    sources = ", ".join(SOURCES[name] for name in dict.fromkeys(row["drafter"] for row in nodes))
    yield f"Tree of {len(nodes)} candidates ({sources}), {accepted} accepted"
    begin = min(row["position"] for row in nodes)
    shown = nodes if len(nodes) <= MOST else [row for row in nodes if row["outcome"] != "unjudged"]
    for row in shown[:MOST]:
        indent = "\u2003" * (row["position"] - begin)
        yield (
            f"{indent}{_MARKS.get(row['outcome'], '?')} {text_of(row)} target {row['target_levels'][0]:.3g}, "
            f"estimated {row['chance']:.3g}, {SOURCES[row['drafter']]}{_describe_match(row)}"
        )
    if left := len(nodes) - len(shown[:MOST]):
        yield f"… and {left} more"
    yield _LEGEND
