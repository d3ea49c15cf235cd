"""Counts of decisions, stored for the large parts of a compacted log so that common queries need not read every row.

There are three tables, each with one row per part and combination of keys. No key grows with the length of the stream
alone, such as an offset would.

- `counts_by_version`: decisions by drafter updates in service and outcome;
- `counts_by_place`: decisions by index in the block and number of pieces, with sums over first levels;
- `counts_by_token`: judged decisions by proposed and emitted token.

The counts of a part have the part's name, in the folder of their table. A part without counts (as the run
writes it) is counted by the query, with the same sums, in `store/query/sql/_counts_*.sql`. Counts add up
over rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import pyarrow as pa
import pyarrow.compute as pc

from store.events import DraftSource, Outcome, Translation


@dataclass(frozen=True, slots=True)
class CountByVersion:
    """Number of decisions of a part with the same outcome and the same drafter updates in service."""

    offset: int  # the lowest
    last_offset: int  # the highest
    dataset: str
    target: str
    drafter: DraftSource
    drafter_version: int
    outcome: Outcome
    decisions: int


@dataclass(frozen=True, slots=True)
class CountByPlace:
    """Number of decisions of a part with the same outcome at the same index of their blocks."""

    offset: int  # the lowest
    dataset: str
    target: str
    drafter: DraftSource
    translation: Translation
    index: int
    pieces_count: int
    outcome: Outcome
    decisions: int
    drafter_level_sum: float | None  # over the first level of each decision; None if no decision has a level
    target_level_sum: float | None


@dataclass(frozen=True, slots=True)
class CountByToken:
    """Number of judged decisions of a part with the same proposed and the same emitted token."""

    offset: int  # the lowest
    target: str
    outcome: Outcome
    proposed_id: int | None  # None if the pieces led to a gap
    proposed_bytes: bytes | None
    emitted_id: int
    emitted_bytes: bytes | None
    decisions: int


COUNTS: Mapping[str, type] = {
    "counts_by_version": CountByVersion,
    "counts_by_place": CountByPlace,
    "counts_by_token": CountByToken,
}
# Aggregates of each group of decisions other than their number: by name, a column and a function.
_MEASURES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "counts_by_version": {"offset": ("offset", "min"), "last_offset": ("offset", "max")},
    "counts_by_place": {
        "offset": ("offset", "min"),
        "drafter_level_sum": ("drafter_level", "sum"),
        "target_level_sum": ("target_level", "sum"),
    },
    "counts_by_token": {
        "offset": ("offset", "min"),
        "proposed_bytes": ("proposed_bytes", "first"),
        "emitted_bytes": ("emitted_bytes", "first"),
    },
}
# Keys: each combination of these columns has a row per part.
KEYS: Mapping[str, tuple[str, ...]] = {
    table: tuple(field.name for field in fields(kind) if field.name not in {"decisions", *_MEASURES[table]})
    for table, kind in COUNTS.items()
}


def roll_up(decisions: pa.Table) -> dict[str, pa.Table]:
    """Count decisions into the three tables, without `seq`; columns are in the order of the dataclasses."""
    return {
        "counts_by_version": _count_groups(decisions, "counts_by_version"),
        "counts_by_place": _count_groups(_add_first_levels(decisions), "counts_by_place"),
        "counts_by_token": _count_groups(_select_judged(decisions), "counts_by_token"),
    }


def _count_groups(decisions: pa.Table, table: str) -> pa.Table:
    """Return one row per combination of keys, in the order of first occurrence."""
    measures = _MEASURES[table]
    grouped = decisions.group_by(list(KEYS[table]), use_threads=False)
    counts = grouped.aggregate([([], "count_all"), *measures.values()])
    renamed = {f"{column}_{how}": name for name, (column, how) in measures.items()} | {"count_all": "decisions"}
    return counts.rename_columns([renamed.get(name, name) for name in counts.schema.names])


def _add_first_levels(decisions: pa.Table) -> pa.Table:
    lengths = pc.list_value_length(decisions["pieces"])
    return (
        decisions.append_column("pieces_count", lengths)
        .append_column("drafter_level", _first_elements(decisions["drafter_levels"]))
        .append_column("target_level", _first_elements(decisions["target_levels"]))
    )


def _first_elements(levels: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the first element of each list in double precision; null for an empty list."""
    filled = pc.if_else(pc.equal(pc.list_value_length(levels), 0), None, levels)
    return pc.list_element(filled, 0).cast(pa.float64())


def _select_judged(decisions: pa.Table) -> pa.Table:
    kinds = pa.array([Outcome.ACCEPTED.value, Outcome.REJECTED.value])
    return decisions.filter(pc.is_in(decisions["outcome"].cast(pa.string()), kinds))
