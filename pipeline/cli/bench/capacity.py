"""The commands `omnidraft plan`, which plans capacity, and `omnidraft bench-plan`, which measures its inputs."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.config.cli_options import (
    MOST_TOKENS,
    DrafterOption,
    JsonOption,
    SetOption,
    argument,
    option,
    overrides_of,
    parse_settings,
)
from pipeline.reports.tables import Table
from pipeline.reports.terminal import RESULT_COLUMNS, make_console
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.bench.capacity.inputs import CapacityInputs
    from pipeline.bench.capacity.measure import DelayedRun
    from pipeline.bench.capacity.plan import CapacityPlan

FULL = 1.0  # share of a capacity from which the plan cannot work
# For `bench-plan`: runs differ in the delay of weights only, with the same decisions on every machine.
STUDIED: Mapping[str, Any] = {
    "batch": 8,
    "threads": 1,
    "draft.adapt": False,
    "draft.sources": ("model",),
    "draft.only_where_paying": False,
    "draft.costs": "estimated",
    "learn.spacing": "fixed",
    "learn.lag": 0,
    "publish.enabled": False,
}
NEVER = "never"  # in place of a delay: new weights are not applied


def plan(
    prompts_per_day: Annotated[
        float, typer.Option(min=1, help="Prompts per day, completed by all workers together.")
    ] = 1_000_000,
    workers: Annotated[int | None, typer.Option(min=1, help="Decode workers. Default: as many as needed.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of a run to take bytes, sizes and decoding speed from.")
    ] = None,
    drafter_parameters: Annotated[
        float | None, typer.Option(min=1, help="Parameters of the drafter. Default: those of the built-in one.")
    ] = None,
    learner_cores: Annotated[
        float, typer.Option(min=0.001, help="Cores that the learner may use; with `serve` it uses 0.2.")
    ] = 1.0,
    network_gbit: Annotated[
        float, typer.Option(min=0.001, help="Network link of a machine and of the store, in Gbit/s.")
    ] = 10.0,
    interval: Annotated[int, typer.Option(min=1, help="Prompts between two updates; each update uses 4 of them.")] = 4,
    publish_interval: Annotated[int, typer.Option(min=1, help="Prompts between two published versions.")] = 64,
    changes_per_day: Annotated[
        float, typer.Option(min=0, help="Changes of traffic per day to a kind that the drafter does not know.")
    ] = 24.0,
    fan_out: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Machines that each machine forwards weights to (broadcast tree). Default: the learner sends to all.",
        ),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Replace a measured value, such as worker_prompts=3; --json lists the names."
        ),
    ] = None,
    json_too: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Plan capacity for a number of prompts per day: sizes, used shares, delay of weights, and the first bottleneck."""
    from pipeline.bench.capacity.plan import DAY, Cluster
    from pipeline.bench.capacity.plan import plan as make_plan

    inputs = _make_inputs(run, drafter_parameters, figure)
    needed = ceil(prompts_per_day / DAY / inputs.worker_prompts)
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
    made = make_plan(cluster, inputs)
    if json_too:
        print(json.dumps(_to_json(made), indent=1))
    else:
        _print(made)


def _make_inputs(run: Path | None, drafter_parameters: float | None, given: list[str] | None) -> "CapacityInputs":
    from pipeline.bench.capacity.inputs import CapacityInputs, inputs_of_run

    inputs = CapacityInputs()
    if run:
        inputs = inputs.with_numbers(inputs_of_run(run, inputs))
    if drafter_parameters:
        inputs = inputs.with_numbers({"drafter_parameters": drafter_parameters})
    return inputs.with_numbers(parse_settings(given))


def _to_json(made: "CapacityPlan") -> dict[str, Any]:
    return {
        "cluster": asdict(made.cluster),
        "figures": asdict(made.inputs),
        "sources": made.inputs.sources(),
        "a day": made.sizes,
        "loads": [asdict(load) for load in made.loads],
        "staleness": asdict(made.staleness),
        "acceptance": made.acceptance,
        "acceptance_at_once": made.acceptance_at_once,
        "first bottleneck": made.bottleneck.name,
        "sentence": _sentence(made),
    }


def _print(made: "CapacityPlan") -> None:
    console, cluster = make_console(RESULT_COLUMNS), made.cluster
    title = f"{cluster.prompts_per_day:,.0f} prompts a day, {cluster.workers:,} workers"
    sizes = Table(("", "in a day"), [(name, _size(name, size)) for name, size in made.sizes.items()], title)
    loads = Table(
        ("", "used", "of"), [(load.name, _share(load.share), load.of) for load in made.loads], "Shares of capacities"
    )
    shares = loads.rich()
    shares.columns[2].justify = "left"
    console.print(sizes.rich(), shares)
    for line in (_lateness(made), _sentence(made)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _share(share: float) -> str:
    return f"{share:.2%}" if share < 10 else f"{share:,.0f} times"


def _size(name: str, size: float) -> str:
    if "bytes" not in name:
        return f"{size:,.0f}"
    unit = next((unit for unit in (1e12, 1e9, 1e6) if size >= unit), 1e3)
    return f"{size / unit:,.1f} {'TGMk'[(1e12, 1e9, 1e6, 1e3).index(unit)]}B"


def _lateness(made: "CapacityPlan") -> str:
    late = made.staleness
    given_up = f"; the learner skips {late.dropped / late.posted:.1%} of the prompts" if late.dropped else ""
    return (
        f"Weights in service have learned from prompts up to {late.seconds:,.1f} s or {late.prompts:,.0f} prompts ago"
        f"{given_up}. Acceptance with {made.cluster.changes_per_day:g} changes of traffic a day: "
        f"{made.acceptance:.3f}; without delay {made.acceptance_at_once:.3f}, "
        f"without learning {made.inputs.curve[0][1]:.3f}."
    )


def _sentence(made: "CapacityPlan") -> str:
    from pipeline.bench.capacity.plan import full_at

    first, at = made.bottleneck, full_at(made.cluster, made.inputs, made.bottleneck.name)
    when = f"full at {at:,.0f} prompts a day" if at else f"{first.share:.1%} used, independent of traffic"
    if first.share >= FULL:
        return f"First bottleneck: {first.name} ({first.of}), {when}. Change: {first.remedy}."
    return f"First bottleneck as traffic grows: {first.name} ({first.of}), {when}. Change then: {first.remedy}."


def bench_plan(
    sources: Annotated[list[str] | None, argument("sources", "Prompt sources, as for `replay`.", "PROMPTS")] = None,
    target: Annotated[str, option("targets", "Target model.")] = "builtin:target-7m",
    drafter: DrafterOption = None,
    limit: Annotated[int, option("source.limit", "Prompts taken from each source.", min=1)] = 160,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; each chooses and orders the prompts.")] = 1,
    delays: Annotated[
        str, typer.Option(help="Delays of new weights in prompts, comma-separated; 'never' applies none.")
    ] = "0,16,64,128,never",
    max_new_tokens: Annotated[int, option("sampling.max_new_tokens", MOST_TOKENS, min=1)] = 32,
    registry_of: Annotated[
        Path | None, typer.Option(help="Instead, measure MLflow with the messages that this run sent.")
    ] = None,
    settings: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure the inputs of `plan`: processor time and bytes of a learner, and acceptance with delayed weights."""
    if registry_of:
        from pipeline.bench.capacity.measure import registry_costs

        print(_costs_line(registry_costs(registry_of)))
        return
    from pipeline.bench.capacity.measure import run
    from pipeline.config.settings import Config

    config = Config().with_overrides(overrides_of(bench_plan, locals()) | {**STUDIED} | parse_settings(settings))
    done: list[DelayedRun] = []

    def print_run(one: "DelayedRun") -> None:
        done.append(one)
        print(_delayed_line(one), flush=True)

    run(config, _delays(delays), seeds, print_run)
    if json_file:
        json_file.write_text(json.dumps([one.to_json() for one in done], indent=1) + "\n", encoding="utf-8")


def _delays(text: str) -> list[int | None]:
    found: list[int | None] = []
    for word in text.split(","):
        if word.strip() != NEVER and not word.strip().isdecimal():
            raise UsageError(f"--delays must be comma-separated numbers of prompts or '{NEVER}'; got '{text}'")
        found.append(None if word.strip() == NEVER else int(word))
    return found


def _delayed_line(one: "DelayedRun") -> str:
    rates = " ".join(f"{window.dataset}+{window.first} {window.acceptance:.3f}" for window in one.windows)
    delay = NEVER if one.delay is None else one.delay
    return f"delay {delay}, seed {one.seed}: {rates}\n  {_costs_line(one.costs.to_json())}"


def _costs_line(costs: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.4g}" for name, value in costs.items())
