"""A study's report: for the terminal, as a section of markdown for `docs/`, and the figures as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.study import Plan
from pipeline.study_arms import StudyName
from pipeline.study_figures import Estimate, last_fifth, switch, whole
from pipeline.study_sheets import RATES, Results, Sheet, of_rates, sheets

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def figures(all_results: Sequence[Results]) -> dict[str, Any]:
    """Every figure as JSON: per target and arm, the mean and standard error of each rate, and what the study adds."""
    return {results.target: {arm: _figures(results, arm) for arm in results.by_arm} for results in all_results}


def _figures(results: Results, arm: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        title: {name: _json(results.over_seeds(arm, of_rates(part, name))) for name in RATES}
        for title, part in (("whole", whole), ("last_fifth", last_fifth))
    }
    for name in ("cache_bytes", "cache_entries", "seconds", "learning"):
        found[name] = _json(results.over_seeds(arm, lambda record, name=name: getattr(record, name)))  # type: ignore[misc]
    if results.plan.study.name is StudyName.DRIFT:
        found["switches"] = [asdict(switch(record)) for record in results.by_arm[arm]]
    return found


def _json(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)


def as_rich(sheet: Sheet) -> "RenderableType":
    """For a terminal; notes below the table."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, head in enumerate(sheet.head):
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return Group(Text(sheet.title, style="bold"), table, *(Text(note, style="dim") for note in sheet.notes), Text())


def as_markdown(sheet: Sheet) -> str:
    """For a page of documentation."""
    lines = [f"**{sheet.title[0].upper()}{sheet.title[1:]}**", "", _pipes(sheet.head)]
    lines.append(_pipes(["---", *["---:"] * (len(sheet.head) - 1)]))
    lines += map(_pipes, sheet.rows)
    lines += [text for note in sheet.notes for text in ("", note)]
    return "\n".join(lines) + "\n"


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def heading(results: Results) -> str:
    """A section's title: the target, and whether its vocabulary is the drafter's."""
    records = [record for own in results.by_arm.values() for record in own]
    words = "one vocabulary" if all(record.same_vocabulary for record in records) else "two vocabularies"
    return f"target {results.target}, drafter {results.plan.config.drafter}, {words if records else 'no run yet'}"


def circumstances(plan: Plan, all_results: Sequence[Results]) -> list[str]:
    """Sentences on what was run, on what, and how much of it is there."""
    records = [record for results in all_results for own in results.by_arm.values() for record in own]
    config, first = plan.config, plan.config.seed
    prompts = sorted({record.segments[-1] for record in records})
    sampling = config.sampling
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
    for notice in dict.fromkeys(notice for record in records for notice in record.notices):
        arms = dict.fromkeys(record.key.arm for record in records if notice in record.notices)
        lines.append(f"{', '.join(arms) if len(arms) < len(plan.arms) else 'all arms'}: {notice}")
    missing = len(plan.order()) - len(records)
    return [*lines, f"{missing} of {len(plan.order())} runs are missing."] if missing else lines


def print_report(console: "Console", plan: Plan, all_results: Sequence[Results]) -> None:
    """All tables of all targets."""
    for line in circumstances(plan, all_results):
        console.print(line, markup=False, highlight=False)
    for results in all_results:
        console.rule(heading(results), align="left")
        for sheet in sheets(results):
            console.print(as_rich(sheet))
    console.print(plan.study.remark, style="dim", markup=False, highlight=False)


def markdown(plan: Plan, all_results: Sequence[Results], command: str, date: str) -> str:
    """A section with the command, the date and every table."""
    parts = [f"## Study: {plan.study.name}, {date}", f"    {command}", *circumstances(plan, all_results)]
    for results in all_results:
        title = heading(results)
        parts += [f"### {title[0].upper()}{title[1:]}", *map(as_markdown, sheets(results))]
    return "\n\n".join(part.rstrip() for part in [*parts, plan.study.remark]) + "\n"
