"""The command `omnidraft bench`: is drafting worth it for these prompts?"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.run import choose_settings
from pipeline.config.cli_options import (
    DrafterOption,
    PrintJsonOption,
    TargetOption,
    argument,
    option,
    overrides_of,
)
from pipeline.config.environment import read_environment
from pipeline.config.settings import Config
from pipeline.reports.terminal import make_table, show_or_json, status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pipeline.bench.comparison import ArmComparison


_FILE_HELP = "Prompt sources, as for `replay`. [default: the questions of the default run]"
_LIMIT_HELP = "Prompts that are timed. More of them show more of what memory and learning gain."
_ROUNDS_HELP = "Rounds into which the prompts are divided. In each round every way takes its turn."
QUESTIONS = ("builtin:questions",)


def bench(
    sources: Annotated[list[str] | None, argument("sources", _FILE_HELP, "FILE")] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    limit: Annotated[int, typer.Option(min=1, help=_LIMIT_HELP)] = 32,
    rounds: Annotated[int, typer.Option(min=1, help=_ROUNDS_HELP)] = 8,
    max_new_tokens: Annotated[
        int | None, option("sampling.max_new_tokens", "Most target tokens in one completion.")
    ] = None,
    temperature: Annotated[float | None, option("sampling.temperature", "Of the target; 0 is greedy.")] = None,
    batch: Annotated[int | None, option("batch")] = None,
    as_json: PrintJsonOption = False,
) -> None:
    """Is drafting worth it for your prompts?

    Plain decoding next to memory, all sources, and learning, on the same prompts and target.

    The table shows tokens per second (the median over rounds), tokens per forward pass of the target, the ratio to
    plain decoding, and how many greedy texts are the same. A sentence says what that means. `transformers` is there
    for reference, with `generate` and no drafts. Ctrl-C shows the rounds that are finished.
    """
    config = _settings(read_environment() | overrides_of(bench, locals()))
    with status("loading the models", is_long=True) as report:
        from pipeline.bench.comparison import compare_arms

        found = compare_arms(config, rounds, limit, report)
    show_or_json(found.to_json(), as_json, lambda console: _show(console, found))


def _settings(given: dict[str, object]) -> Config:
    """Return the settings; without a file and a target those of the default run, of which the questions are used."""
    config = choose_settings(Config(), given)
    named = {"sources": config.sources} if "sources" in given else {"sources": QUESTIONS}
    return config.with_overrides({**named, "source.limit": None})


def _show(console: "Console", found: "ArmComparison") -> None:
    for line in _describe(found):
        console.print(line, style="dim", highlight=False, markup=False)
    console.print()
    console.print(_make_table(found))
    for note in found.notes:
        console.print(note, style="dim", highlight=False, markup=False)
    console.print()
    from pipeline.bench.comparison import make_verdict

    console.print(make_verdict(found), style="bold", highlight=False, markup=False)


def _describe(found: "ArmComparison") -> Iterator[str]:
    config, machine = found.settings, found.machine
    sampling = config.sampling
    yield (
        f"target {config.targets[0]} ({machine['target_parameters'] / 1e6:.1f}M), drafter {config.drafter} "
        f"({machine['drafter_parameters'] / 1e6:.1f}M), {machine['device']}, {machine['threads']} threads"
    )
    rejected = f"; {found.rejected} rows did not fit" if found.rejected else ""
    yield (
        f"{found.prompts} prompts of {', '.join(config.sources)} in {found.rounds} rounds, {config.batch} at a time, "
        f"up to {sampling.max_new_tokens} tokens each, temperature {sampling.temperature:g}{rejected}"
    )


def _make_table(found: "ArmComparison") -> "Table":
    heads = ("", "tokens/s", "tokens/forward", "to plain", "quartiles", "same texts")
    rows = [
        (
            name,
            f"{one.tokens_per_second:.1f}",
            f"{one.tokens_per_forward:.2f}",
            f"{one.ratio.median:.2f}",
            f"{one.ratio.lower:.2f}-{one.ratio.upper:.2f}",
            "-" if one.equal is None else f"{one.equal:.0%}",
        )
        for name, one in found.arms.items()
    ]
    return make_table(heads, rows)
