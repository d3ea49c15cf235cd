"""Counts of decisions, kept beside the large parts of a compacted log: common questions need not read every row.

Three tables, each with one row per part and combination of its columns, none of which is a number that only grows:

- `counts_by_version`: how many decisions ended how, under which drafter;
- `counts_by_place`: the same by the index in the block and by the number of pieces, with sums of the first level;
- `counts_by_token`: of judged decisions, which token was proposed and which was emitted.

The counts of a part have its name in the folder of their table. What has none (a part that the run wrote, a log of
version 3) is counted when it is asked for, by `store/sql/_counts_*.sql`: the same sums. Counts add up over rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc

from store.events import Drafter, Outcome, Translation


@dataclass(frozen=True, slots=True)
class CountByVersion:
    """Decisions that ended alike under one version of the drafter, within one part."""

    offset: int  # the lowest
    last_offset: int  # the highest
    dataset: str
    target: str
    drafter: Drafter
    drafter_version: int
    outcome: Outcome
    decisions: int


@dataclass(frozen=True, slots=True)
class CountByPlace:
    """Decisions that ended alike at one index of their blocks, within one part."""

    offset: int  # the lowest
    dataset: str
    target: str
    drafter: Drafter
    translation: Translation
    index: int
    pieces_count: int
    outcome: Outcome
    decisions: int
    drafter_level_sum: float | None  # over the first level of each; None where none has a level
    target_level_sum: float | None


@dataclass(frozen=True, slots=True)
class CountByToken:
    """Judged decisions with the same proposed and the same emitted token, within one part."""

    offset: int  # the lowest
    target: str
    outcome: Outcome
    proposed_id: int | None  # None where the pieces led to a gap
    proposed_bytes: bytes | None
    emitted_id: int
    emitted_bytes: bytes | None
    decisions: int


COUNTS: Mapping[str, type] = MappingProxyType(
    {"counts_by_version": CountByVersion, "counts_by_place": CountByPlace, "counts_by_token": CountByToken}
)
# What is counted apart: the columns of which each combination has a row per part.
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "counts_by_version": ("dataset", "target", "drafter", "drafter_version", "outcome"),
        "counts_by_place": ("dataset", "target", "drafter", "translation", "index", "pieces_count", "outcome"),
        "counts_by_token": ("target", "outcome", "proposed_id", "emitted_id"),
    }
)


def roll_up(decisions: pa.Table) -> dict[str, pa.Table]:
    """The three tables of counts of some decisions, without `seq`; columns in the order of their dataclasses."""
    return {
        "counts_by_version": _counted(
            decisions,
            KEYS["counts_by_version"],
            {"offset": ("offset", "min"), "last_offset": ("offset", "max")},
        ),
        "counts_by_place": _counted(
            _with_first_levels(decisions),
            KEYS["counts_by_place"],
            {
                "offset": ("offset", "min"),
                "drafter_level_sum": ("drafter_level", "sum"),
                "target_level_sum": ("target_level", "sum"),
            },
        ),
        "counts_by_token": _counted(
            _judged(decisions),
            KEYS["counts_by_token"],
            {
                "offset": ("offset", "min"),
                "proposed_bytes": ("proposed_bytes", "first"),
                "emitted_bytes": ("emitted_bytes", "first"),
            },
        ),
    }


def _counted(decisions: pa.Table, keys: Sequence[str], measures: Mapping[str, tuple[str, str]]) -> pa.Table:
    """Group by `keys`; a measure is a column and what becomes of it. In the order of first occurrence."""
    grouped = decisions.group_by(list(keys), use_threads=False).aggregate([([], "count_all"), *measures.values()])
    renamed = {f"{column}_{how}": name for name, (column, how) in measures.items()} | {"count_all": "decisions"}
    return grouped.rename_columns([renamed.get(name, name) for name in grouped.schema.names])


def _with_first_levels(decisions: pa.Table) -> pa.Table:
    lengths = pc.list_value_length(decisions["pieces"])
    return (
        decisions.append_column("pieces_count", lengths)
        .append_column("drafter_level", _first(decisions["drafter_levels"]))
        .append_column("target_level", _first(decisions["target_levels"]))
    )


def _first(levels: pa.ChunkedArray) -> pa.ChunkedArray:
    """The first element of each list in double precision; null for an empty one."""
    filled = pc.if_else(pc.equal(pc.list_value_length(levels), 0), None, levels)
    return pc.list_element(filled, 0).cast(pa.float64())


def _judged(decisions: pa.Table) -> pa.Table:
    kinds = pa.array([Outcome.ACCEPTED.value, Outcome.REJECTED.value])
    return decisions.filter(pc.is_in(decisions["outcome"].cast(pa.string()), kinds))
