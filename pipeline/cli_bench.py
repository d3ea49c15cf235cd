"""`omnidraft bench`: tokens per second beside plain `transformers` and other engines, on the same prompts."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.bench_arms import ArmName, Engines
from pipeline.cli_options import parsed
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.bench_report import Report
    from pipeline.bench_rounds import Plan
    from pipeline.config import Config


Sources = Annotated[
    list[str] | None, typer.Argument(help="Prompt sources, as for `replay`.", metavar="SOURCE", show_default=False)
]
Prompts = Annotated[
    int | None,
    typer.Option(min=1, help="Timed prompts, made up to whole rounds; by default 10 rounds.", show_default=False),
]
RoundPrompts = Annotated[
    int | None,
    typer.Option(min=1, help="Prompts of a round; by default twice the batch, at least 4.", show_default=False),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting.", show_default=False)
]
Arms = Annotated[
    str | None,
    typer.Option(help="What is compared, with commas between; by default all that can run.", show_default=False),
]
LlamaCpp = Annotated[
    Path | None, typer.Option(help="Compare with llama.cpp, built in this folder.", show_default=False)
]


def bench(
    sources: Sources = None,
    target: Annotated[str | None, typer.Option(help="Target model.", show_default=False)] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter.", show_default=False)] = None,
    batch: Annotated[str, typer.Option(help="Most prompts at a time; several with commas between run in turn.")] = "1",
    prompts: Prompts = None,
    round_prompts: RoundPrompts = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Untimed prompts before them, to learn from.")] = 42,
    max_new_tokens: Annotated[int, typer.Option(help="Most target tokens in one completion.")] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature of the target; 0 is greedy.")] = 0.0,
    max_draft: Annotated[int, typer.Option(help="Most pieces drafted per block, by all arms but the defaults.")] = 5,
    threads: Annotated[int | None, typer.Option(help="CPU threads for tensors.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="Torch device; auto takes the best.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0,
    template: Annotated[str | None, typer.Option(help="Text made from a row's columns.", show_default=False)] = None,
    where: Annotated[list[str] | None, typer.Option(help="Condition on a column.", show_default=False)] = None,
    settings: Settings = None,
    arms: Arms = None,
    openvino: Annotated[bool, typer.Option("--openvino", help="Compare with OpenVINO GenAI, if installed.")] = False,
    llama_cpp: LlamaCpp = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Measure tokens per second, round by round in turn in one process: `transformers` plain, assisted, by prompt
    lookup and in continuous batches, other engines, and this pipeline plain, frozen, learning and with its log."""
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise UsageError(f"--json must name a file in a folder that exists, got '{json_file}'")
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
    overrides |= {key: value for key, value in given.items() if value} | parsed(settings or [])
    engines = _engines(openvino, llama_cpp)
    plans = _plans(overrides, _batches(batch), arms, engines, (prompts, round_prompts, warm_up))
    _run_all(plans, engines, json_file, markdown)


def _run_all(
    plans: Sequence[tuple["Config", "Plan"]], engines: Engines, json_file: Path | None, markdown: bool
) -> None:
    """One batch after the other. What is done is written after each, in case that the next is broken off."""
    runs = []
    for config, plan in plans:
        report = _run(config, plan, engines)
        _print(report, markdown)
        runs.append(report.to_json())
        if json_file is not None:
            json_file.write_text(json.dumps({"runs": runs}, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _batches(text: str) -> list[int]:
    """Whole numbers with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--batch must be numbers from 1 with commas between, such as 1,4,8, got '{text}'")
    return [int(part) for part in dict.fromkeys(parts)]


def _engines(openvino: bool, llama_cpp: Path | None) -> Engines:
    """The engines that flags name."""
    from pipeline.bench_engines import find_engines

    return find_engines(openvino=openvino, llama_cpp=llama_cpp)


def _plans(
    overrides: dict[str, Any],
    batches: Sequence[int],
    arms: str | None,
    engines: Engines,
    sizes: tuple[int | None, int | None, int],
) -> list[tuple["Config", "Plan"]]:
    """What is run for every batch; all of it is checked before anything is loaded."""
    from pipeline.bench_build import arms_at, require_usable
    from pipeline.bench_rounds import Plan
    from pipeline.config import Config

    plans, (prompts, round_prompts, warm_up) = [], sizes
    for batch in batches:
        config = Config().with_overrides(overrides | {"batch": batch})
        if len(config.targets) > 1 or config.swaps:
            raise UsageError(f"The benchmark is of one target, got {', '.join(config.targets)}; run it for each")
        temperature = config.sampling.temperature
        names = _names(arms, engines.names(1, temperature)) if arms else arms_at(batch, temperature, engines)
        require_usable(names, batch, temperature, engines)
        plans.append((config, Plan.of(names, batch, prompts, round_prompts, warm_up)))
    return plans


def _names(text: str, engines: Sequence[str]) -> list[str]:
    """The names of arms in a list with commas, each once."""
    known = [*map(str, ArmName), *engines]
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"--arms must name arms of the benchmark, got '{name}'; {hint}")
    return names


def _run(config: "Config", plan: "Plan", engines: Engines) -> "Report":
    from pipeline.bench import run

    with _progress() as progress:
        return run(config, plan, engines, progress)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error while it runs; nothing of it stays."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading the models", total=None)
        yield lambda what, done, steps: bar.update(task, description=what, completed=done, total=steps)


def _print(report: "Report", markdown: bool) -> None:
    from pipeline.bench_tables import as_markdown, show

    if markdown:
        typer.echo(as_markdown(report))
    else:
        show(report)
