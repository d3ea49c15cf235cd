"""`omnidraft bench`: tokens per second beside plain `transformers`, on the same prompts and target."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from store.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.bench import Figures, Mean, Report, Spread
    from pipeline.bench_arms import ArmName

PIPE_COLUMNS = 160  # wide enough that a table in a pipe is not folded
ALL_ARMS = "plain,assisted,assisted-defaults,frozen,learning"
NOT_MEASURED = "–"


def bench(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Prompt sources, as for `replay`.", metavar="SOURCE", show_default=False),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target model.", show_default=False)] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter.", show_default=False)] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Timed prompts.")] = 20,
    warm_up: Annotated[int, typer.Option(min=0, help="Untimed prompts before them, to learn from.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(help="Most target tokens in one completion.")] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature of the target; 0 is greedy.")] = 0.0,
    max_draft: Annotated[int, typer.Option(help="Most pieces drafted per block, by all arms but the defaults.")] = 5,
    threads: Annotated[int | None, typer.Option(help="CPU threads for tensors.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="Torch device; auto takes the best.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0,
    template: Annotated[str | None, typer.Option(help="Text made from a row's columns.", show_default=False)] = None,
    where: Annotated[list[str] | None, typer.Option(help="Condition on a column.", show_default=False)] = None,
    arms: Annotated[str, typer.Option(help="What is compared, with commas between.")] = ALL_ARMS,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures there.", show_default=False)
    ] = None,
) -> None:
    """Measure tokens per second: plain `transformers`, its assisted generation, and this pipeline with and without
    learning, prompt by prompt in turn in one process."""
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json must name a file in a folder that exists, got '{json_file}'")
    chosen = _arms(arms)
    overrides: dict[str, Any] = {
        "sampling.max_new_tokens": max_new_tokens,
        "sampling.temperature": temperature,
        "draft.max_draft": max_draft,
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "seed": seed,
        "source.template": template,
    }
    given = {"sources": sources, "targets": (target,) if target else None, "drafter": drafter, "source.where": where}
    report = _run(overrides | {key: value for key, value in given.items() if value}, prompts, warm_up, chosen)
    _print(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")


def _arms(text: str) -> list[str]:
    """The names of arms in a list with commas, each once."""
    known = ALL_ARMS.split(",")
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"--arms must name arms of the benchmark, got '{name}'; {hint}")
    return names


def _run(overrides: dict[str, Any], prompts: int, warm_up: int, arms: list[str]) -> "Report":
    from pipeline.bench import Plan, run
    from pipeline.bench_arms import ArmName
    from pipeline.config import Config

    plan = Plan(prompts, warm_up, tuple(ArmName(name) for name in arms))
    with _progress() as progress:
        return run(Config().with_overrides(overrides), plan, progress)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error while it runs; nothing of it stays."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading the models", total=None)
        yield lambda what, done, steps: bar.update(task, description=what, completed=done, total=steps)


def _print(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    _print_header(console, report)
    table = Table()
    for head in ("arm", "tokens/s", "quartiles", f"ratio to {report.reference}", "quartiles", "overall"):
        table.add_column(head, justify="left" if head == "arm" else "right")
    greedy = report.settings["sampling"]["temperature"] == 0
    for head in ("acceptance", "tokens/block", "learning", "differing" if greedy else "nats/token"):
        table.add_column(head, justify="right")
    for name, figures in report.figures.items():
        table.add_row(_label(name, report), *_cells(figures))
    console.print(table)
    _print_notes(console, report)


def _print_header(console: "Console", report: "Report") -> None:
    machine, settings = report.machine, report.settings
    sampling = settings["sampling"]
    console.print(
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, load {machine['load']}; "
        f"torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}",
        f"target {settings['targets'][0]} ({machine['target_parameters'] / 1e6:.1f} M), "
        f"drafter {settings['drafter']} ({machine['drafter_parameters'] / 1e6:.1f} M), {settings['dtype']}",
        f"{settings['prompts']} prompts of {', '.join(settings['sources'])} after {settings['warm_up']} to warm up, "
        f"up to {sampling['max_new_tokens']} tokens each, temperature {sampling['temperature']:g}, batch 1",
        sep="\n",
        highlight=False,
        markup=False,
    )


def _print_notes(console: "Console", report: "Report") -> None:
    console.print(
        "tokens/s and ratio: medians over prompts; overall: ratio of all tokens over all seconds, learning included",
        style="dim",
    )
    if any(figures.differing for figures in report.figures.values()):
        console.print(f"Some greedy completions are not those of {report.reference}: see the last column.", style="red")
    if report.settings["sampling"]["temperature"] > 0:
        console.print(
            "nats/token: surprisal of the tokens under the target's law; arms that keep the law agree within errors",
            style="dim",
        )
    for name in report.off_law():
        console.print(
            f"{_label(name, report)} does not draw from the target's law: its speed is not comparable.", style="red"
        )
    if report.machine["load"] and report.machine["load"] > report.machine["cores"]:
        console.print("Other processes were using the cores: figures of a quiet machine may differ.", style="yellow")


def _label(name: "ArmName", report: "Report") -> str:
    labels = {
        "plain": "transformers generate",
        "assisted": f"transformers assisted, k={report.settings['draft']['max_draft']}",
        "assisted-defaults": "transformers assisted, defaults",
        "frozen": "omnidraft frozen",
        "learning": "omnidraft learning",
    }
    return labels[name]


def _cells(figures: "Figures") -> list[str]:
    return [
        f"{figures.tokens_per_second.median:.1f}",
        _quartiles(figures.tokens_per_second, ".1f"),
        f"{figures.ratio.median:.2f}",
        _quartiles(figures.ratio, ".2f"),
        f"{figures.ratio.overall:.2f}",
        _optional(figures.acceptance_rate, ".3f"),
        _optional(figures.block_efficiency, ".2f"),
        _optional(figures.learning_share, ".1%"),
        _mean(figures.nats_per_token) if figures.nats_per_token else _optional(figures.differing, "d"),
    ]


def _quartiles(spread: "Spread", form: str) -> str:
    return f"{spread.lower:{form}} to {spread.upper:{form}}"


def _mean(mean: "Mean") -> str:
    return f"{mean.value:.2f} ± {_optional(mean.error, '.2f')}"


def _optional(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else f"{value:{form}}"
