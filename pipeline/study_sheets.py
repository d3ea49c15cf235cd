"""A study's tables in words: which rows, which columns, which ratios beside the paper's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.study import Plan
from pipeline.study_arms import PaperColumn, StudyName
from pipeline.study_figures import (
    WINDOW,
    Estimate,
    Figure,
    Rates,
    Switch,
    back_again,
    estimate,
    last_fifth,
    ratio,
    segment_rates,
    switch,
    whole,
)
from pipeline.study_records import Record, same_prompts

NONE = "–"
RATES = {
    "acceptance": ("acceptance", 3),
    "block_efficiency": ("tokens/forward", 3),
    "accepted_length": ("accepted length", 3),
    "tokens_per_second": ("tokens/s", 1),
    "tokens_per_cpu_second": ("tokens/CPU s", 1),
}


@dataclass(frozen=True)
class Sheet:
    """One table, already in words. The first column is the arm's.

    Attributes:
        notes: sentences below it.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    """The records of one target, by arm in the plan's order; arms without a finished run have none."""

    plan: Plan
    target: str
    by_arm: Mapping[str, Sequence[Record]]

    def over_seeds(self, arm: str, figure: Figure) -> Estimate | None:
        """Mean of a figure over an arm's seeds."""
        return estimate(figure(record) for record in self.by_arm[arm])

    def ratio(self, arm: str, reference: str, figure: Figure) -> Estimate | None:
        """An arm's figure over the reference's, paired by seed."""
        return ratio(self.by_arm[arm], self.by_arm.get(reference, ()), figure)


def results_of(plan: Plan, records: Sequence[Record]) -> list[Results]:
    """The plan's runs among the records, per target.

    Raises:
        CorruptError: runs of one seed had different prompts.
    """
    planned = set(plan.order())
    mine = [record for record in records if record.key in planned]
    same_prompts(mine)
    return [
        Results(
            plan,
            target,
            {arm.name: [r for r in mine if r.key.target == target and r.key.arm == arm.name] for arm in plan.arms},
        )
        for target in plan.targets
    ]


def of_rates(part: Callable[[Record], Rates], name: str) -> Figure:
    """A figure of a run: one of the rates of a part of it."""
    return lambda record: getattr(part(record), name)


def sheets(results: Results) -> list[Sheet]:
    """All tables of one target."""
    made = [_rates_sheet(results, "whole stream", whole), _rates_sheet(results, "last fifth of the stream", last_fifth)]
    match results.plan.study.name:
        case StudyName.DRIFT:
            return [*made, _depth_sheet(results), _recovery_sheet(results), *_segment_sheets(results)]
        case StudyName.CACHE:
            made.append(_size_sheet(results))
    return [*made, *_comparisons(results)]


def _rates_sheet(results: Results, title: str, part: Callable[[Record], Rates]) -> Sheet:
    head = ("arm", *(words for words, _ in RATES.values()))
    rows = tuple(
        (arm, *(_shown(results.over_seeds(arm, of_rates(part, name)), digits) for name, (_, digits) in RATES.items()))
        for arm in results.by_arm
    )
    return Sheet(title, head, rows)


def _shown(found: Estimate | None, digits: int) -> str:
    """`0.512 ± 0.004`; the error is left out where there is one seed, and seeds are told where some have no value."""
    if found is None:
        return NONE
    error = "" if found.error is None else f" ± {found.error:.{digits}f}"
    return f"{found.value:.{digits}f}{error}"


def _comparisons(results: Results) -> list[Sheet]:
    """Against each reference: acceptance, then speed, with the paper's ratios beside."""
    made = []
    for reference in results.plan.study.references:
        if reference in results.by_arm:
            made += [_acceptance_sheet(results, reference), _speed_sheet(results, reference)]
    return made


def _acceptance_sheet(results: Results, reference: str) -> Sheet:
    figure = of_rates(last_fifth, "acceptance")
    columns = results.plan.study.paper
    found = {arm: results.ratio(arm, reference, figure) for arm in results.by_arm}
    rows = tuple(
        (arm, _shown(one, 2), _gain(one), *_paper(columns, PaperColumn.acceptance, arm, reference))
        for arm, one in found.items()
    )
    title = f"acceptance as a multiple of '{reference}': ours in the last fifth, paired by seed; the paper's"
    return Sheet(title, ("arm", "ours", "gain", *(column.title for column in columns)), rows)


def _speed_sheet(results: Results, reference: str) -> Sheet:
    columns = results.plan.study.paper
    ours = (
        of_rates(last_fifth, "block_efficiency"),
        of_rates(whole, "tokens_per_second"),
        of_rates(whole, "tokens_per_cpu_second"),
    )
    rows = tuple(
        (
            arm,
            *(_shown(results.ratio(arm, reference, figure), 2) for figure in ours),
            *_paper(columns, PaperColumn.speed, arm, reference),
        )
        for arm in results.by_arm
    )
    title = f"speed as a multiple of '{reference}': ours (tokens/forward in the last fifth), the paper's speed-ups"
    head = ("arm", "tokens/forward", "tokens/s", "tokens/CPU s", *(column.title for column in columns))
    notes = _head_notes(results) if results.plan.study.name is StudyName.HEAD else ()
    return Sheet(title, head, rows, notes)


def _paper(
    columns: Sequence[PaperColumn], of: Callable[[PaperColumn, str, str], float | None], arm: str, reference: str
) -> list[str]:
    found = [of(column, arm, reference) for column in columns]
    return [NONE if value is None else f"{value:.2f}" for value in found]


def _gain(found: Estimate | None) -> str:
    """A ratio as what it adds: `+12.5% ± 1.2%`."""
    if found is None:
        return NONE
    error = "" if found.error is None else f" ± {found.error:.1%}"
    return f"{found.value - 1:+.1%}{error}"


def best_fixed(results: Results, speed: str = "tokens_per_second") -> str | None:
    """The fixed length that was fastest over the whole stream, chosen when all is known."""
    figure = of_rates(whole, speed)
    found = {arm: results.over_seeds(arm, figure) for arm in results.by_arm if arm.startswith("fixed ")}
    speeds = {arm: one.value for arm, one in found.items() if one is not None}
    return max(speeds, key=lambda arm: speeds[arm], default=None)


def _head_notes(results: Results) -> tuple[str, ...]:
    """By wall time, then by processor time: the best fixed length, and the adaptive arms over it."""
    notes = []
    for speed in ("tokens_per_second", "tokens_per_cpu_second"):
        best = best_fixed(results, speed)
        if best is not None:
            found = {arm: results.ratio(arm, best, of_rates(whole, speed)) for arm in results.by_arm}
            over = [f"{arm} {_shown(one, 3)}" for arm, one in found.items() if not arm.startswith("fixed ")]
            notes.append(
                f"Best fixed length by {RATES[speed][0]} over the whole stream, chosen afterwards: {best}. Over it, "
                f"paired by seed: {'; '.join(over)}."
            )
    return tuple(notes)


def _size_sheet(results: Results) -> Sheet:
    def size(arm: str) -> tuple[str, str, str]:
        share = results.plan.study.arm(arm).share
        entries = results.over_seeds(arm, lambda record: record.cache_entries)
        size = results.over_seeds(arm, lambda record: record.cache_bytes / 1024)
        return (NONE if share is None else f"{share:.2f}", _shown(entries, 0), _shown(size, 1))

    head = ("arm", "budget, share of full", "entries at the end", "KiB at the end")
    return Sheet("size of the cache", head, tuple((arm, *size(arm)) for arm in results.by_arm))


def _depth_sheet(results: Results) -> Sheet:
    columns: dict[str, Callable[[Switch], float | None]] = {
        "before": lambda found: found.before,
        "deepest": lambda found: found.deepest,
        "drop, points": lambda found: found.drop,
        "drop, share": lambda found: found.relative_drop,
        "end of segment": lambda found: found.end,
    }
    title = f"acceptance around the first switch, windows of {WINDOW} prompts"
    return Sheet(title, ("arm", *columns), _switch_rows(results, columns, 3))


def _recovery_sheet(results: Results) -> Sheet:
    columns: dict[str, Callable[[Switch], float | None]] = {
        "alarm after": lambda found: found.delay,
        "alarms behind": lambda found: found.alarms,
        "false alarms": lambda found: found.false_alarms,
        "recalls": lambda found: found.recalls,
        "90% of end": lambda found: found.to_end,
        "90% of before": lambda found: found.to_before,
    }
    notes = (
        "Alarm after, 90% of end, 90% of before: prompts from the switch; in brackets the seeds that got there, where "
        "not all did. False alarms: on a fall, before the switch.",
    )
    return Sheet("alarms and recovery", ("arm", *columns), _switch_rows(results, columns, 1), notes)


def _switch_rows(
    results: Results, columns: Mapping[str, Callable[[Switch], float | None]], digits: int
) -> tuple[tuple[str, ...], ...]:
    def cell(records: Sequence[Record], value: Callable[[Switch], float | None]) -> str:
        found = estimate(value(switch(record)) for record in records)
        some = f" ({found.seeds} of {len(records)})" if found and found.seeds < len(records) else ""
        return _shown(found, digits) + some

    return tuple((arm, *(cell(own, value) for value in columns.values())) for arm, own in results.by_arm.items())


def _segment_sheets(results: Results) -> list[Sheet]:
    """Of a stream A B A B: where each segment begins and ends."""
    if results.plan.segment is None:
        return []

    def span(arm: str, number: int) -> str:
        first = results.over_seeds(arm, lambda record: segment_rates(record, number)[0])
        last = results.over_seeds(arm, lambda record: segment_rates(record, number)[1])
        return f"{_shown(first, 3)} → {_shown(last, 3)}"

    names = ("1, A", "2, B", "3, A", "4, B")
    rows = tuple(
        (arm, *(span(arm, number) for number in range(len(names))), _shown(results.over_seeds(arm, back_again), 3))
        for arm in results.by_arm
    )
    return [Sheet("acceptance in the first → last fifth of each segment", ("arm", *names, "3 over 1"), rows)]
