"""Panels of the paper's tables and figures from the results of their blocks."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.studies.definitions import PaperColumn
from benchmarks.studies.metrics import Estimate, whole
from benchmarks.studies.paper.blocks import CacheSize
from benchmarks.studies.paper.curves import make_series
from benchmarks.studies.paper.figures import CurveKind, PaperFigure
from benchmarks.studies.paper.panels import Panel, Series
from benchmarks.studies.paper.report import BlockResults, count_entries_per_prompt
from benchmarks.studies.report import Results, of_rates

_LABELS = {
    CurveKind.ACCEPTANCE: ("prompt", "acceptance rate"),
    CurveKind.HITS: ("prompt", "accepted n-grams per response"),
    CurveKind.GROWTH: ("emitted tokens", "entries of the n-gram cache"),
    CurveKind.FREQUENCY: ("rank of the n-gram", "emissions"),
}
_RATIOS: Mapping[str, tuple[str, Callable[[PaperColumn, str, str], float | None]]] = {
    "acceptance": ("acceptance rate as a multiple of '{}'", PaperColumn.acceptance),
    "tokens_per_cpu_second": ("tokens/CPU s as a multiple of '{}' (paper: speed-up)", PaperColumn.speed_ratio),
}


def draw_table(blocks: Sequence[BlockResults]) -> list[Panel]:
    """Return the panels of a table: of each block and target the ratios between arms, or the size of the cache."""
    return [
        panel
        for one in blocks
        for results in one.by_target
        for panel in (
            [_draw_size(one, results, one.block.cache)]
            if one.block.cache
            else [_draw_ratios(one, results, rate) for rate in _RATIOS]
        )
    ]


def _draw_ratios(one: BlockResults, results: Results, rate: str) -> Panel:
    block, arms, (label, of_paper) = one.block, list(results.by_arm), _RATIOS[rate]
    ours = _make_own_series([results.ratio(arm, block.reference, of_rates(whole, rate)) for arm in arms])
    papers = [
        Series(f"paper, {column.title}", [of_paper(column, arm, block.reference) for arm in arms], is_paper=True)
        for column in block.study.paper
    ]
    return Panel(_name(one, results), label.format(block.reference), [ours, *papers], categories=arms)


def _draw_size(one: BlockResults, results: Results, paper: CacheSize) -> Panel:
    arms = list(results.by_arm)
    ours = _make_own_series([results.over_seeds(arm, count_entries_per_prompt) for arm in arms])
    theirs = Series("paper, Qwen2-7B", [paper.entries_per_prompt for _ in arms], is_paper=True)
    return Panel(_name(one, results), "entries of the cache per prompt", [ours, theirs], categories=arms)


def _make_own_series(found: Sequence[Estimate | None]) -> Series:
    values = [one.value if one else None for one in found]
    return Series("ours", values, errors=[one.error if one else None for one in found])


def _name(one: BlockResults, results: Results) -> str:
    return f"{one.block.title}, {results.target}" if len(one.by_target) > 1 else one.block.title


def draw_figure(chosen: PaperFigure, blocks: Sequence[BlockResults]) -> list[Panel]:
    """Return the panels of a paper's figure: all its curves together, or apart by block."""
    groups = [[one] for one in blocks] if chosen.is_split else [list(blocks)]
    return [_draw_curves(chosen, group) for group in groups]


def _draw_curves(chosen: PaperFigure, blocks: Sequence[BlockResults]) -> Panel:
    across, value = _LABELS[chosen.curve]
    series = [
        make_series(
            " ".join(_name_curve(one, results, arm, blocks)),
            records,
            chosen.curve,
            shift=len(records[0].passed) if records and one.block.name in chosen.late else 0,
        )
        for one in blocks
        for results in one.by_target
        for arm, records in results.by_arm.items()
    ]
    marks = _find_changes(blocks[0]) if chosen.curve is CurveKind.ACCEPTANCE else {}
    title = blocks[0].block.title if chosen.is_split else ""
    return Panel(title, value, series, across, marks=marks, is_logarithmic=chosen.curve is CurveKind.FREQUENCY)


def _name_curve(one: BlockResults, results: Results, arm: str, blocks: Sequence[BlockResults]) -> list[str]:
    """Return what distinguishes a curve from the others: its block, its target, its arm."""
    parts = [f"{one.block.title}:"] if len(blocks) > 1 else []
    parts += [results.target] if len(one.by_target) > 1 else []
    return [*parts, arm]


def _find_changes(one: BlockResults) -> dict[str, float]:
    """Return the prompts at which data or target change, by a description."""
    records = next((records for results in one.by_target for records in results.by_arm.values() if records), ())
    switches = {f"other data from {at}": at for record in records[:1] for at in record.segments[1:-1]}
    swaps = (swap.partition("=") for swap in one.plan.config.swaps)
    return {**switches, **{f"{target} from {offset}": int(offset) for offset, _, target in swaps}}
