"""Report of a table of the paper: ours next to the paper's ratios."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.studies.metrics import NONE, Metric, format_estimate, last_fifth, whole
from benchmarks.studies.paper.blocks import CacheSize, PaperBlock
from benchmarks.studies.records import Record
from benchmarks.studies.report import Results, circumstances, of_rates
from benchmarks.studies.runner import StudyPlan
from benchmarks.tables import Table

Section = tuple[str, Sequence[Table]]  # heading and tables


@dataclass(frozen=True)
class BlockResults:
    """The results of one block of a table."""

    block: PaperBlock  # what was compared
    plan: StudyPlan  # how it was run
    by_target: Sequence[Results]  # results of each target, in the order of the plan


def make_sections(blocks: Sequence[BlockResults]) -> list[Section]:
    """The tables of each target: one over all blocks, then one per block."""
    targets = blocks[0].plan.targets
    sections: list[Section] = []
    for place, target in enumerate(targets):
        results = [(one.block, one.by_target[place]) for one in blocks]
        drafter = blocks[0].plan.config.drafter
        overview = [] if blocks[0].block.cache else [_make_overview(results)]
        details = [table for block, found in results for table in _tables_of(block, found)]
        sections.append((f"target {target}, drafter {drafter}", [*overview, *details]))
    return sections


def _make_overview(results: Sequence[tuple[PaperBlock, Results]]) -> Table:
    """The ratios of acceptance of all blocks: ours, and the range of the paper's."""
    arms = list(dict.fromkeys(arm for block, _ in results for arm in (one.name for one in block.study.arms)))
    rows = [(arm, *(_format_cell(block, found, arm) for block, found in results)) for arm in arms]
    reference = results[0][0].reference
    title = f"Acceptance as a multiple of '{reference}': ours over the whole stream (the paper's)"
    return Table(("arm", *(block.title for block, _ in results)), rows, title)


def _format_cell(block: PaperBlock, found: Results, arm: str) -> str:
    ours = found.ratio(arm, block.reference, _WHOLE_ACCEPTANCE) if arm in found.by_arm else None
    theirs = [column.acceptance(arm, block.reference) for column in block.study.paper]
    known = sorted(ratio for ratio in theirs if ratio is not None)
    if not known:
        return format_estimate(ours, 2)
    span = f"{known[0]:.2f}" if known[0] == known[-1] else f"{known[0]:.2f} to {known[-1]:.2f}"
    return f"{format_estimate(ours, 2)} ({span})"


_WHOLE_ACCEPTANCE = of_rates(whole, "acceptance")
_WHOLE_EFFICIENCY = of_rates(whole, "block_efficiency")
_CPU_SPEED = of_rates(whole, "tokens_per_cpu_second")


def _tables_of(block: PaperBlock, results: Results) -> list[Table]:
    if block.cache:
        return [_make_size_table(block, block.cache, results)]
    made = [_make_acceptance_table(block, results), _make_speed_table(block, results)]
    if block.hits:
        made.append(_make_hits_table(block, results))
    return made


def _make_acceptance_table(block: PaperBlock, results: Results) -> Table:
    columns, reference = block.study.paper, block.reference
    rows = [
        (
            arm,
            format_estimate(results.over_seeds(arm, _WHOLE_ACCEPTANCE), 3),
            format_estimate(results.over_seeds(arm, of_rates(last_fifth, "acceptance")), 3),
            format_estimate(results.ratio(arm, reference, _WHOLE_ACCEPTANCE), 2),
            *(_format_ratio(column.acceptance(arm, reference)) for column in columns),
        )
        for arm in results.by_arm
    ]
    heads = ("arm", "whole stream", "last fifth", f"over {reference}", *(f"paper, {one.title}" for one in columns))
    return Table(heads, rows, f"{block.title}: acceptance rate")


def _make_speed_table(block: PaperBlock, results: Results) -> Table:
    columns, reference = block.study.paper, block.reference
    ratios: Sequence[Metric] = (_WHOLE_EFFICIENCY, _CPU_SPEED)
    rows = [
        (
            arm,
            format_estimate(results.over_seeds(arm, _WHOLE_EFFICIENCY), 3),
            format_estimate(results.over_seeds(arm, _CPU_SPEED), 1),
            *(format_estimate(results.ratio(arm, reference, metric), 2) for metric in ratios),
            *(_format_ratio(column.speed_ratio(arm, reference)) for column in columns),
        )
        for arm in results.by_arm
    ]
    heads = (
        *(
            "arm",
            "tokens/forward",
            "tokens/CPU s",
            f"tokens/forward over {reference}",
            f"tokens/CPU s over {reference}",
        ),
        *(f"paper's speed-up, {one.title}" for one in columns),
    )
    return Table(heads, rows, f"{block.title}: speed, learning included")


def _make_hits_table(block: PaperBlock, results: Results) -> Table:
    rows = [
        (arm, format_estimate(results.over_seeds(arm, count_hits), 2), _format_ratio(block.hits.get(arm)))
        for arm in results.by_arm
    ]
    return Table(("arm", "ours", "paper"), rows, f"{block.title}: accepted n-grams per response")


def count_hits(record: Record) -> float | None:
    """Accepted n-grams per response."""
    return record.accepted_ngrams / len(record.passed) if record.passed else None


def _make_size_table(block: PaperBlock, paper: CacheSize, results: Results) -> Table:
    def row(name: str, metric: Metric, digits: int, theirs: float) -> tuple[str, ...]:
        ours = (format_estimate(results.over_seeds(arm, metric), digits) for arm in results.by_arm)
        return (name, *ours, f"{theirs:,.{digits}f}")

    rows = (
        row("prompts", lambda one: len(one.passed), 0, paper.prompts),
        row("entries", lambda one: one.cache_entries, 0, paper.entries),
        row("KiB", lambda one: one.cache_bytes / 1024, 1, paper.megabytes * 1e6 / 1024),
        row("bytes per entry", lambda one: _divide(one.cache_bytes, one.cache_entries), 0, paper.bytes_per_entry),
        row("entries per prompt", count_entries_per_prompt, 2, paper.entries_per_prompt),
    )
    return Table(("", *results.by_arm, "paper"), rows, f"{block.title}: the cache at the end")


def count_entries_per_prompt(record: Record) -> float | None:
    """Entries of the cache at the end per prompt."""
    return _divide(record.cache_entries, len(record.passed))


def _divide(above: float, below: float) -> float | None:
    return above / below if below else None


def _format_ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def describe(blocks: Sequence[BlockResults]) -> list[str]:
    """Sentences on prompts, settings and machine: one list for all blocks, each with its own prompts."""
    lines: dict[str, None] = {}
    for one in blocks:
        first, *others = circumstances(one.plan, one.by_target)
        lines[f"{one.block.title}: {first}"] = None
        lines |= dict.fromkeys(others)
    return list(lines)
