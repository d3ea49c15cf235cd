"""Tables of the study `learning`: along the stream, by fifths of its prompts."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.studies.metrics import acceptance, estimate, fifths, format_estimate, right_first_pieces
from benchmarks.studies.records import PromptCounts, Record
from benchmarks.tables import Table

Part = Callable[[Sequence[PromptCounts]], float | None]


def learning_tables(by_arm: Mapping[str, Sequence[Record]]) -> list[Table]:
    """Return the tables of right first pieces, of acceptance at a fixed length, and of processor seconds."""
    return [
        _make_table(by_arm, "right first pieces at all tokens, by fifths of the prompts", right_first_pieces, 3),
        _make_table(by_arm, "acceptance of drafts of a fixed length, by fifths of the prompts", acceptance, 3),
        _make_table(by_arm, "processor seconds from the start, learning included", _last_cpu, 1, learning=True),
    ]


def _make_table(
    by_arm: Mapping[str, Sequence[Record]], title: str, part: Part, digits: int, *, learning: bool = False
) -> Table:
    ends = [0]
    for record in next((records for records in by_arm.values() if records), ())[:1]:
        for fifth in fifths(record):
            ends.append(ends[-1] + len(fifth))
    head = [f"prompt {end}" for end in ends[1:]] or [f"fifth {number}" for number in range(1, 6)]
    rows = tuple(
        (
            arm,
            *(format_estimate(estimate(part(fifths(record)[n]) for record in records), digits) for n in range(5)),
            *((format_estimate(estimate(record.learning for record in records), digits),) if learning else ()),
        )
        for arm, records in by_arm.items()
    )
    return Table(("arm", *head, *(("updates",) if learning else ())), rows, title)


def _last_cpu(passed: Sequence[PromptCounts]) -> float | None:
    return passed[-1].cpu if passed else None
