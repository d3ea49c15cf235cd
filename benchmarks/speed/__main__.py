"""Tokens per second next to `transformers`, on the same prompts: `python -m benchmarks.speed --quick`."""

import json
import logging
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import JsonOption, run
from benchmarks.speed.arms import ON_REQUEST, ArmName, Engines, NoEngines, arms_at, require_usable
from benchmarks.speed.benchmark import run as run_plan
from benchmarks.speed.monitor import Monitor
from benchmarks.speed.plan import FULL, QUICK, SpeedPlan
from benchmarks.speed.report import show
from pipeline.config.cli_options import (
    DrafterOption,
    SetOption,
    TargetOption,
    argument,
    option,
    overrides_of,
    parse_settings,
)
from pipeline.config.settings import Config
from pipeline.reports.terminal import require_file
from store.errors import UsageError

LOG = logging.getLogger("omnidraft.bench")

_ROUND_HELP = "Prompts per round. [default: twice the batch, at least 8; with --quick the batch, at least 3]"
_WARM_UP_HELP = "Untimed prompts before the timed ones, to learn from. [default: 42; with --quick 3]"
_QUICK_HELP = "4 rounds of 3 prompts of up to 32 tokens with the arms plain, own-plain, memory and logged."
NO_ENGINES = NoEngines()


def bench(
    sources: Annotated[list[str] | None, argument("sources", "Prompt sources, as for `replay`.", "SOURCE")] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    batch: Annotated[str, typer.Option(help="Batch size; comma-separated sizes are measured one after another.")] = "1",
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Timed prompts, rounded up to whole rounds. [default: 10 rounds; with --quick 4]"),
    ] = None,
    round_prompts: Annotated[int | None, typer.Option(min=1, help=_ROUND_HELP)] = None,
    quick: Annotated[bool, typer.Option("--quick", help=_QUICK_HELP)] = False,
    warm_up: Annotated[int | None, typer.Option(min=0, help=_WARM_UP_HELP)] = None,
    max_new_tokens: Annotated[
        int | None, option("sampling.max_new_tokens", "Most tokens of a completion. [default: 64; with --quick 32]")
    ] = None,
    temperature: Annotated[float, option("sampling.temperature", "Temperature of the target; 0 is greedy.")] = 0.0,
    where: Annotated[list[str] | None, option("source.where")] = None,
    settings: SetOption = None,
    arms: Annotated[
        str | None, typer.Option(help="Arms to compare, comma-separated. Default: all that can run.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure tokens per second on the same prompts: `transformers` (plain, assisted, prompt lookup, continuous
    batching) and this pipeline (plain, frozen, learning, learning with its log).

    All arms run in one process and take turns, round by round, on the same prompts. Ctrl-C prints the tables of the
    rounds that all arms have finished.
    """
    defaults = QUICK if quick else FULL
    require_file("--json", json_file)
    lengths = {"sampling.max_new_tokens": defaults.max_new_tokens}
    overrides = lengths | overrides_of(bench, locals()) | parse_settings(settings)
    plans = []
    for size in parse_batches(batch):
        config = Config().with_overrides(overrides | {"batch": size})
        names = choose_arms(arms, config, quick=quick)
        plan = SpeedPlan.from_options(names, size, prompts, round_prompts, warm_up, defaults=defaults)
        plans.append((config, plan))
    run_all(plans, NO_ENGINES, json_file)


def run_all(plans: Sequence[tuple[Config, SpeedPlan]], engines: Engines, json_file: Path | None) -> None:
    """Measure one batch size after another. Writes all results after each one, in case the next is interrupted.

    Raises:
        UsageError: there are several targets.
        typer.Exit: with status 130, after Ctrl-C; the results so far are printed and written.
    """
    runs = []
    for config, plan in plans:
        if len(config.targets) > 1 or config.swaps:
            raise UsageError(f"the benchmark must have one target, got {', '.join(config.targets)}; run it for each")
        try:
            report = run_plan(config, plan, engines, Monitor())
        except KeyboardInterrupt:
            LOG.warning("interrupted before the results of a finished round were computed: there are no tables to show")
            raise typer.Exit(130) from None
        show(report)
        runs.append(report.to_json())
        if json_file is not None:
            json_file.write_text(json.dumps({"runs": runs}, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if report.partial:
            raise typer.Exit(130)


def parse_batches(text: str) -> list[int]:
    """Parse comma-separated batch sizes, each once.

    >>> parse_batches("1, 8,1")
    [1, 8]

    Raises:
        UsageError: one of them is not a whole number from 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--batch must be comma-separated numbers from 1, such as 1,4,8, got '{text}'")
    return [int(part) for part in dict.fromkeys(parts)]


def choose_arms(text: str | None, config: Config, *, quick: bool) -> list[str]:
    """Return the named arms, or by default those that can run and are not only on request.

    Raises:
        UsageError: a name is unknown, or its arm cannot run.
    """
    batch, temperature = config.batch, config.sampling.temperature
    if text is None:
        return [name for name in arms_at(batch, temperature, NO_ENGINES, quick=quick) if name not in ON_REQUEST]
    known = list(map(str, ArmName))
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"--arms must name arms of the benchmark, got '{name}'; {hint}")
    require_usable(names, batch, temperature, NO_ENGINES)
    return names


if __name__ == "__main__":
    run(bench)
