"""Report of a study: tables for the terminal, and results as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.studies.curves import learning_tables
from benchmarks.studies.definitions import PaperColumn, StudyName
from benchmarks.studies.metrics import (
    NONE,
    WINDOW,
    Estimate,
    Metric,
    RunRates,
    Switch,
    back_again,
    estimate,
    fifths,
    format_estimate,
    last_fifth,
    ratio,
    right_first_pieces,
    segment_rates,
    switch,
    whole,
)
from benchmarks.studies.records import Record, same_prompts
from benchmarks.studies.runner import StudyPlan
from benchmarks.tables import Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

RATES = {
    "acceptance": ("acceptance", 3),
    "block_efficiency": ("tokens/forward", 3),
    "accepted_length": ("accepted length", 3),
    "tokens_per_second": ("tokens/s", 1),
    "tokens_per_cpu_second": ("tokens/CPU s", 1),
}


@dataclass(frozen=True)
class Results:
    """Records of one target by arm, in the order of the plan; the list of an arm without finished runs is empty."""

    plan: StudyPlan
    target: str
    by_arm: Mapping[str, Sequence[Record]]

    def over_seeds(self, arm: str, metric: Metric) -> Estimate | None:
        """Mean of a value over the seeds of an arm; None if there is no value."""
        return estimate(metric(record) for record in self.by_arm[arm])

    def ratio(self, arm: str, reference: str, metric: Metric) -> Estimate | None:
        """Mean ratio of a value in an arm to that in the reference arm, paired by seed; None if there is none."""
        return ratio(self.by_arm[arm], self.by_arm.get(reference, ()), metric)


def results_of(plan: StudyPlan, records: Sequence[Record]) -> list[Results]:
    """Group the records of the plan's runs by target and arm.

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


def of_rates(part: Callable[[Record], RunRates], name: str) -> Metric:
    """A function that returns the rate `name` of a part of a run."""
    return lambda record: getattr(part(record), name)


def tables(results: Results) -> list[Table]:
    """All tables of one target."""
    made = [_rates_table(results, "whole stream", whole), _rates_table(results, "last fifth of the stream", last_fifth)]
    match results.plan.study.name:
        case StudyName.DRIFT:
            return [*made, _depth_table(results), _recovery_table(results), *_segment_tables(results)]
        case StudyName.CACHE:
            made.append(_size_table(results))
        case StudyName.LEARNING:
            made += learning_tables(results.by_arm)
    return [*made, *_comparisons(results)]


def _rates_table(results: Results, title: str, part: Callable[[Record], RunRates]) -> Table:
    head = ("arm", *(words for words, _ in RATES.values()))
    rows = tuple(
        (
            arm,
            *(
                format_estimate(results.over_seeds(arm, of_rates(part, name)), digits)
                for name, (_, digits) in RATES.items()
            ),
        )
        for arm in results.by_arm
    )
    return Table(head, rows, title)


def _comparisons(results: Results) -> list[Table]:
    """Tables of acceptance and speed relative to each reference, next to the paper's ratios."""
    made = []
    for reference in results.plan.study.references:
        if reference in results.by_arm:
            made += [_acceptance_table(results, reference), _speed_table(results, reference)]
    return made


def _acceptance_table(results: Results, reference: str) -> Table:
    metric = of_rates(last_fifth, "acceptance")
    columns = results.plan.study.paper
    found = {arm: results.ratio(arm, reference, metric) for arm in results.by_arm}
    rows = tuple(
        (arm, format_estimate(one, 2), _gain(one), *_paper(columns, PaperColumn.acceptance, arm, reference))
        for arm, one in found.items()
    )
    title = f"acceptance as a multiple of '{reference}': ours in the last fifth, paired by seed; the paper's"
    return Table(("arm", "ours", "gain", *(column.title for column in columns)), rows, title)


def _speed_table(results: Results, reference: str) -> Table:
    columns = results.plan.study.paper
    ours = (
        of_rates(last_fifth, "block_efficiency"),
        of_rates(whole, "tokens_per_second"),
        of_rates(whole, "tokens_per_cpu_second"),
    )
    rows = tuple(
        (
            arm,
            *(format_estimate(results.ratio(arm, reference, metric), 2) for metric in ours),
            *_paper(columns, PaperColumn.speed_ratio, arm, reference),
        )
        for arm in results.by_arm
    )
    title = f"speed as a multiple of '{reference}': ours (tokens/forward in the last fifth), the paper's speed-ups"
    head = ("arm", "tokens/forward", "tokens/s", "tokens/CPU s", *(column.title for column in columns))
    notes = _head_notes(results) if results.plan.study.name is StudyName.HEAD else ()
    return Table(head, rows, title, notes)


def _paper(
    columns: Sequence[PaperColumn], of: Callable[[PaperColumn, str, str], float | None], arm: str, reference: str
) -> list[str]:
    found = [of(column, arm, reference) for column in columns]
    return [NONE if value is None else f"{value:.2f}" for value in found]


def _gain(found: Estimate | None) -> str:
    """Format a ratio as a gain: `+12.5% ± 1.2%`."""
    if found is None:
        return NONE
    error = "" if found.error is None else f" ± {found.error:.1%}"
    return f"{found.value - 1:+.1%}{error}"


def best_fixed(results: Results, speed: str = "tokens_per_second") -> str | None:
    """Name of the fixed-length arm that was fastest over the whole stream, chosen afterwards; None without one."""
    metric = of_rates(whole, speed)
    found = {arm: results.over_seeds(arm, metric) for arm in results.by_arm if arm.startswith("fixed ")}
    speeds = {arm: one.value for arm, one in found.items() if one is not None}
    return max(speeds, key=lambda arm: speeds[arm], default=None)


def _head_notes(results: Results) -> tuple[str, ...]:
    """Notes with the best fixed length and the adaptive arms relative to it, by wall time and by processor time."""
    notes = []
    for speed in ("tokens_per_second", "tokens_per_cpu_second"):
        best = best_fixed(results, speed)
        if best is not None:
            found = {arm: results.ratio(arm, best, of_rates(whole, speed)) for arm in results.by_arm}
            over = [f"{arm} {format_estimate(one, 3)}" for arm, one in found.items() if not arm.startswith("fixed ")]
            notes.append(
                f"Best fixed length by {RATES[speed][0]} over the whole stream, chosen afterwards: {best}. Over it, "
                f"paired by seed: {'; '.join(over)}."
            )
    return tuple(notes)


def _size_table(results: Results) -> Table:
    def size(arm: str) -> tuple[str, str, str]:
        share = results.plan.study.arm(arm).share
        entries = results.over_seeds(arm, lambda record: record.cache_entries)
        size = results.over_seeds(arm, lambda record: record.cache_bytes / 1024)
        return (NONE if share is None else f"{share:.2f}", format_estimate(entries, 0), format_estimate(size, 1))

    head = ("arm", "budget, share of full", "entries at the end", "KiB at the end")
    return Table(head, tuple((arm, *size(arm)) for arm in results.by_arm), "size of the cache")


def _depth_table(results: Results) -> Table:
    columns: dict[str, Callable[[Switch], float | None]] = {
        "before": lambda found: found.before,
        "deepest": lambda found: found.deepest,
        "drop, points": lambda found: found.drop,
        "drop, share": lambda found: found.relative_drop,
        "end of segment": lambda found: found.end,
    }
    title = f"acceptance around the first switch, windows of {WINDOW} prompts"
    return Table(("arm", *columns), _switch_rows(results, columns, 3), title)


def _recovery_table(results: Results) -> Table:
    columns: dict[str, Callable[[Switch], float | None]] = {
        "alarm after": lambda found: found.delay,
        "alarms after": lambda found: found.alarms,
        "false alarms": lambda found: found.false_alarms,
        "recalls": lambda found: found.recalls,
        "90% of end": lambda found: found.to_end,
        "90% of before": lambda found: found.to_before,
    }
    notes = (
        "Alarm after, 90% of end, 90% of before: prompts from the switch; in brackets the seeds with a value, "
        "if not all have one. False alarms: alarms on a drop before the switch.",
    )
    return Table(("arm", *columns), _switch_rows(results, columns, 1), "alarms and recovery", notes)


def _switch_rows(
    results: Results, columns: Mapping[str, Callable[[Switch], float | None]], digits: int
) -> tuple[tuple[str, ...], ...]:
    def cell(records: Sequence[Record], value: Callable[[Switch], float | None]) -> str:
        found = estimate(value(switch(record)) for record in records)
        some = f" ({found.seeds} of {len(records)})" if found and found.seeds < len(records) else ""
        return format_estimate(found, digits) + some

    return tuple((arm, *(cell(own, value) for value in columns.values())) for arm, own in results.by_arm.items())


def _segment_tables(results: Results) -> list[Table]:
    """Table of a stream A B A B: rates at the start and the end of each segment."""
    if results.plan.segment is None:
        return []

    def span(arm: str, number: int) -> str:
        first = results.over_seeds(arm, lambda record: segment_rates(record, number)[0])
        last = results.over_seeds(arm, lambda record: segment_rates(record, number)[1])
        return f"{format_estimate(first, 3)} → {format_estimate(last, 3)}"

    names = ("1, A", "2, B", "3, A", "4, B")
    rows = tuple(
        (
            arm,
            *(span(arm, number) for number in range(len(names))),
            format_estimate(results.over_seeds(arm, back_again), 3),
        )
        for arm in results.by_arm
    )
    return [Table(("arm", *names, "3 over 1"), rows, "acceptance in the first → last fifth of each segment")]


def results_json(all_results: Sequence[Results]) -> dict[str, Any]:
    """All results as JSON values: mean and standard error of each rate, by target and arm, and switches of drift."""
    return {results.target: {arm: _arm_json(results, arm) for arm in results.by_arm} for results in all_results}


def _arm_json(results: Results, arm: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        title: {name: _json(results.over_seeds(arm, of_rates(part, name))) for name in RATES}
        for title, part in (("whole", whole), ("last_fifth", last_fifth))
    }
    for name in ("cache_bytes", "cache_entries", "seconds", "learning"):
        found[name] = _json(results.over_seeds(arm, lambda record, name=name: getattr(record, name)))  # type: ignore[misc]
    if results.plan.study.name is StudyName.DRIFT:
        found["switches"] = [asdict(switch(record)) for record in results.by_arm[arm]]
    if results.plan.study.name is StudyName.LEARNING:
        records = results.by_arm[arm]
        found["right_first_pieces"] = [
            _json(estimate(right_first_pieces(fifths(record)[part]) for record in records)) for part in range(5)
        ]
    return found


def _json(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def as_rich(table: Table) -> "RenderableType":
    """Format a table for the terminal, with its notes below."""
    from rich.console import Group
    from rich.text import Text

    made = table.rich(title=None, padding=(0, 1, 0, 0))
    return Group(Text(table.title, style="bold"), made, *(Text(note, style="dim") for note in table.notes), Text())


def heading(results: Results) -> str:
    """Title of a section: target, drafter, and whether they share one vocabulary."""
    records = [record for own in results.by_arm.values() for record in own]
    words = "one vocabulary" if all(record.same_vocabulary for record in records) else "two vocabularies"
    drafter = results.plan.config.with_overrides({"targets": (results.target,)}).drafter  # which targets may choose
    return f"target {results.target}, drafter {drafter}, {words if records else 'no run yet'}"


def circumstances(plan: StudyPlan, all_results: Sequence[Results]) -> list[str]:
    """Sentences on prompts, settings, machine, warnings and missing runs."""
    records = [record for results in all_results for own in results.by_arm.values() for record in own]
    config, first = plan.config, plan.config.seed
    prompts = sorted({record.segments[-1] for record in records})
    sampling = plan.base_config().sampling
    seeds = f"seed {first}" if plan.seeds == 1 else f"seeds {first} to {first + plan.seeds - 1}"
    lines = [
        f"{' or '.join(map(str, prompts))} prompts of {', '.join(config.sources)} per run, up to "
        f"{sampling.max_new_tokens} tokens each, temperature {sampling.temperature:g}, batch {config.batch}, {seeds}; "
        "mean ± standard error over seeds."
    ]
    devices = {
        f"{one.machine['device']}, torch {one.machine['torch']}, threads {one.machine['threads']}" for one in records
    }
    loads = [one.machine["load"] for one in records if one.machine["load"] is not None]
    load = f"; load {min(loads):.1f} to {max(loads):.1f} on {records[0].machine['cores']} cores" if loads else ""
    lines.append(f"{' and '.join(sorted(devices))}{load}.")
    for message in dict.fromkeys(message for record in records for message in record.notices):
        arms = dict.fromkeys(record.key.arm for record in records if message in record.notices)
        lines.append(f"{', '.join(arms) if len(arms) < len(plan.arms) else 'all arms'}: {message}")
    missing = len(plan.order()) - len(records)
    return [*lines, f"{missing} of {len(plan.order())} runs are missing."] if missing else lines


def print_report(console: "Console", plan: StudyPlan, all_results: Sequence[Results]) -> None:
    """Print all tables of all targets."""
    for line in circumstances(plan, all_results):
        console.print(line, markup=False, highlight=False)
    for results in all_results:
        console.rule(heading(results), align="left")
        for table in tables(results):
            console.print(as_rich(table))
    console.print(plan.study.remark, style="dim", markup=False, highlight=False)
