"""`omnidraft plan`: what grows with traffic and workers, and what is full first."""

import json
import sys
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import parsed

if TYPE_CHECKING:
    from rich.table import Table

    from pipeline.plan_figures import Figures
    from pipeline.scale_plan import Plan

PIPE_COLUMNS = 120  # a table in a pipe is not folded to a terminal that is not there
FULL = 1.0  # share from which on it cannot be done

JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def plan(
    prompts_per_day: Annotated[float, typer.Option(min=1, help="Completed by all workers together.")] = 1_000_000,
    workers: Annotated[
        int | None, typer.Option(min=1, help="That decode; by default as many as it takes.", show_default=False)
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Take bytes, sizes and the pace of decoding from this run.", show_default=False)
    ] = None,
    drafter_parameters: Annotated[
        float | None,
        typer.Option(min=1, help="Size of the drafter; by default the built-in one's.", show_default=False),
    ] = None,
    learner_cores: Annotated[
        float, typer.Option(min=0.001, help="Cores that the learner may use; beside `serve` it takes 0.2.")
    ] = 1.0,
    network_gbit: Annotated[
        float, typer.Option(min=0.001, help="Link of a machine and of the store, in Gbit/s.")
    ] = 10.0,
    interval: Annotated[int, typer.Option(min=1, help="Prompts between two updates, each of 4 of them.")] = 4,
    publish_interval: Annotated[int, typer.Option(min=1, help="Prompts between two versions.")] = 64,
    changes_per_day: Annotated[float, typer.Option(min=0, help="Changes of traffic to a kind that is new.")] = 24.0,
    fan_out: Annotated[
        int | None,
        typer.Option(
            min=2, help="Machines to which one passes weights on; by default one sends to all.", show_default=False
        ),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            "--figure",
            metavar="NAME=VALUE",
            help="A figure of your own, such as worker_prompts=3; --json names them.",
            show_default=False,
        ),
    ] = None,
    json_too: JsonOption = False,
) -> None:
    """Plan for so many prompts a day: sizes, shares of capacities, how late weights are, and the first bottleneck."""
    from pipeline.scale_plan import DAY, Cluster
    from pipeline.scale_plan import plan as make_plan

    figures = _figures(run, drafter_parameters, figure or [])
    needed = ceil(prompts_per_day / DAY / figures.worker_prompts)
    cluster = Cluster(
        prompts_per_day=prompts_per_day,
        workers=workers or needed,
        learner_cores=learner_cores,
        network=network_gbit * 1e9 / 8,
        publish_interval=publish_interval,
        update_interval=interval,
        changes_per_day=changes_per_day,
        fan_out=fan_out,
    )
    made = make_plan(cluster, figures)
    if json_too:
        print(json.dumps(_to_json(made), indent=1))
    else:
        _print(made)


def _figures(run: Path | None, drafter_parameters: float | None, given: list[str]) -> "Figures":
    from pipeline.plan_figures import Figures

    figures = Figures()
    if run:
        from pipeline.plan_run import figures_of_run

        figures = figures.with_numbers(figures_of_run(run, figures))
    if drafter_parameters:
        figures = figures.with_numbers({"drafter_parameters": drafter_parameters})
    return figures.with_numbers(parsed(given))


def _to_json(made: "Plan") -> dict[str, Any]:
    return {
        "cluster": asdict(made.cluster),
        "figures": asdict(made.figures),
        "sources": made.figures.sources(),
        "a day": made.sizes,
        "loads": [asdict(load) for load in made.loads],
        "staleness": asdict(made.staleness),
        "acceptance": made.acceptance,
        "acceptance_at_once": made.acceptance_at_once,
        "first bottleneck": made.bottleneck.name,
        "sentence": _sentence(made),
    }


def _print(made: "Plan") -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
    cluster = made.cluster
    sizes = _table(f"{cluster.prompts_per_day:,.0f} prompts a day, {cluster.workers:,} workers", "in a day", "")
    for name, size in made.sizes.items():
        sizes.add_row(name, _size(name, size))
    loads = _table("Shares of capacities", "used", "of")
    for load in made.loads:
        loads.add_row(load.name, f"{load.share:.2%}" if load.share < 10 else f"{load.share:,.0f} times", load.of)
    console.print(sizes, loads)
    for line in (_lateness(made), _sentence(made)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table("", title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column(columns[0], justify="right")
    if columns[1]:
        table.add_column(columns[1])
    return table


def _size(name: str, size: float) -> str:
    if "bytes" not in name:
        return f"{size:,.0f}"
    unit = next((unit for unit in (1e12, 1e9, 1e6) if size >= unit), 1e3)
    return f"{size / unit:,.1f} {'TGMk'[(1e12, 1e9, 1e6, 1e3).index(unit)]}B"


def _lateness(made: "Plan") -> str:
    late = made.staleness
    given_up = f"; {late.dropped / late.posted:.1%} of the prompts teach nothing" if late.dropped else ""
    return (
        f"Weights in service have learned from prompts up to {late.seconds:,.1f} s or {late.prompts:,.0f} prompts ago"
        f"{given_up}. Acceptance with {made.cluster.changes_per_day:g} changes of traffic a day: "
        f"{made.acceptance:.3f}; never late {made.acceptance_at_once:.3f}, "
        f"without learning {made.figures.curve[0][1]:.3f}."
    )


def _sentence(made: "Plan") -> str:
    from pipeline.scale_plan import full_at

    first, at = made.bottleneck, full_at(made.cluster, made.figures, made.bottleneck.name)
    when = f"full at {at:,.0f} prompts a day" if at else f"{first.share:.1%} used, whatever the traffic"
    if first.share >= FULL:
        return f"First bottleneck: {first.name} ({first.of}), {when}. Change: {first.remedy}."
    return f"First bottleneck as traffic grows: {first.name} ({first.of}), {when}. Change then: {first.remedy}."
