"""`omnidraft bench-plan`: measures what `omnidraft plan` goes by."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import parsed
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.bench_plan import Delayed

# For `bench-plan`: what is compared is how late weights are, with the same decisions on every machine.
STUDIED: Mapping[str, Any] = {
    "batch": 8,
    "threads": 1,
    "draft.adapt": False,
    "draft.lookup": False,
    "draft.only_where_paying": False,
    "draft.costs": "estimated",
    "learn.spacing": "fixed",
    "learn.lag": 0,
    "publish.enabled": False,
}
NEVER = "never"  # in place of a delay: new weights are not taken into service


def bench_plan(
    sources: Annotated[
        list[str] | None, typer.Argument(help="Prompt sources, as for `replay`.", metavar="PROMPTS", show_default=False)
    ] = None,
    target: Annotated[str, typer.Option(help="Target model.")] = "builtin:target-7m",
    drafter: Annotated[str | None, typer.Option(help="Drafter.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each source.")] = 160,
    seeds: Annotated[int, typer.Option(min=1, help="How many; each chooses and orders the prompts.")] = 1,
    delays: Annotated[
        str, typer.Option(help="Prompts by which new weights come late, with commas between; 'never' as well.")
    ] = "0,16,64,128,never",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most target tokens in one completion.")] = 32,
    registry_of: Annotated[
        Path | None,
        typer.Option(help="Measure MLflow instead, with what this run sent there.", show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there.", show_default=False)
    ] = None,
) -> None:
    """Measure what `plan` goes by: a learner's processor time and bytes, and acceptance where weights come late."""
    if registry_of:
        from pipeline.bench_plan_registry import registry_costs

        print(_costs_line(registry_costs(registry_of)))
        return
    from pipeline.bench_plan import run
    from pipeline.config import Config

    given = {"targets": (target,), "source.limit": limit, "sampling.max_new_tokens": max_new_tokens, **STUDIED}
    named: dict[str, Any] = {"sources": tuple(sources) if sources else None, "drafter": drafter}
    given |= {key: value for key, value in named.items() if value} | parsed(settings or [])
    done: list[Delayed] = []

    def passed(one: "Delayed") -> None:
        done.append(one)
        print(_delayed_line(one), flush=True)

    run(Config().with_overrides(given), _delays(delays), seeds, passed)
    if json_file:
        json_file.write_text(json.dumps([one.to_json() for one in done], indent=1) + "\n", encoding="utf-8")


def _delays(text: str) -> list[int | None]:
    found: list[int | None] = []
    for word in text.split(","):
        if word.strip() != NEVER and not word.strip().isdecimal():
            raise UsageError(f"--delays must be numbers of prompts or '{NEVER}', with commas between; got '{text}'")
        found.append(None if word.strip() == NEVER else int(word))
    return found


def _delayed_line(one: "Delayed") -> str:
    rates = " ".join(f"{window.dataset}+{window.first} {window.acceptance:.3f}" for window in one.windows)
    delay = NEVER if one.delay is None else one.delay
    return f"delay {delay}, seed {one.seed}: {rates}\n  {_costs_line(one.costs.to_json())}"


def _costs_line(costs: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.4g}" for name, value in costs.items())
