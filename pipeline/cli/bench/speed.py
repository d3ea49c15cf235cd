"""The command `omnidraft bench`: tokens per second next to `transformers` and other engines, on the same prompts."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.bench.speed.arms import ArmName, Engines, arms_at, require_usable
from pipeline.config.cli_options import (
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
    MostTokensOption,
    SetOption,
    SourcesOption,
    TargetOption,
    TemplateOption,
    ThreadsOption,
    argument,
    option,
    overrides_of,
    parse_settings,
)
from pipeline.reports.terminal import require_file, stderr_console
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.bench.speed.benchmark import SpeedPlan
    from pipeline.bench.speed.report import SpeedReport
    from pipeline.config.settings import Config

_DRAFT_HELP = "Most pieces drafted per block, in all arms except assisted-defaults."


def bench(
    sources: Annotated[list[str] | None, argument("sources", "Prompt sources, as for `replay`.", "SOURCE")] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    batch: Annotated[str, typer.Option(help="Batch size; comma-separated sizes are measured one after another.")] = "1",
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Timed prompts, rounded up to whole rounds. Default: 10 rounds.")
    ] = None,
    round_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts per round. Default: twice the batch, at least 8.")
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Untimed prompts before the timed ones, to learn from.")] = 42,
    max_new_tokens: MostTokensOption = 64,
    temperature: Annotated[float, option("sampling.temperature", "Temperature of the target; 0 is greedy.")] = 0.0,
    max_draft: Annotated[int, option("draft.max_draft", _DRAFT_HELP)] = 5,
    draft_sources: SourcesOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    seed: Annotated[int, option("seed", "Seed of all random draws.")] = 0,
    template: TemplateOption = None,
    where: Annotated[
        list[str] | None,
        option("source.where", "Condition 'column=value' or 'column!=value' on the rows of the sources."),
    ] = None,
    settings: SetOption = None,
    arms: Annotated[
        str | None, typer.Option(help="Arms to compare, comma-separated. Default: all that can run.")
    ] = None,
    openvino: Annotated[bool, typer.Option("--openvino", help="Include OpenVINO GenAI, if it is installed.")] = False,
    llama_cpp: Annotated[Path | None, typer.Option(help="Include llama.cpp, built in this folder.")] = None,
    json_file: JsonOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Measure tokens per second on the same prompts: `transformers` (plain, assisted, prompt lookup, continuous
    batching), other engines, and this pipeline (plain, frozen, learning, learning with its log).

    All arms run in one process and take turns, round by round.
    """
    require_file("--json", json_file)
    overrides = overrides_of(bench, locals()) | parse_settings(settings)
    engines = _engines(openvino, llama_cpp)
    plans = _plans(overrides, _batches(batch), arms, engines, (prompts, round_prompts, warm_up))
    _run_all(plans, engines, json_file, markdown)


def _run_all(
    plans: Sequence[tuple["Config", "SpeedPlan"]], engines: Engines, json_file: Path | None, markdown: bool
) -> None:
    """Measure one batch size after another. Writes all results after each one, in case the next is interrupted."""
    runs = []
    for config, plan in plans:
        report = _run(config, plan, engines)
        _print(report, markdown)
        runs.append(report.to_json())
        if json_file is not None:
            json_file.write_text(json.dumps({"runs": runs}, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _batches(text: str) -> list[int]:
    """Parse comma-separated batch sizes, each once.

    Raises:
        UsageError: one of them is not a whole number from 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--batch must be comma-separated numbers from 1, such as 1,4,8, got '{text}'")
    return [int(part) for part in dict.fromkeys(parts)]


def _engines(openvino: bool, llama_cpp: Path | None) -> Engines:
    """The engines that the options name."""
    from pipeline.bench.engines.engines import find_engines

    return find_engines(openvino=openvino, llama_cpp=llama_cpp)


def _plans(
    overrides: dict[str, Any],
    batches: Sequence[int],
    arms: str | None,
    engines: Engines,
    sizes: tuple[int | None, int | None, int],
) -> list[tuple["Config", "SpeedPlan"]]:
    """Configuration and plan of every batch size, checked before anything is loaded.

    Raises:
        UsageError: there are several targets, or an arm cannot run.
    """
    from pipeline.bench.speed.benchmark import SpeedPlan
    from pipeline.config.settings import Config

    plans, (prompts, round_prompts, warm_up) = [], sizes
    for batch in batches:
        config = Config().with_overrides(overrides | {"batch": batch})
        if len(config.targets) > 1 or config.swaps:
            raise UsageError(f"the benchmark must have one target, got {', '.join(config.targets)}; run it for each")
        temperature = config.sampling.temperature
        names = _names(arms, engines.names(1, temperature)) if arms else arms_at(batch, temperature, engines)
        require_usable(names, batch, temperature, engines)
        plans.append((config, SpeedPlan.from_options(names, batch, prompts, round_prompts, warm_up)))
    return plans


def _names(text: str, engines: Sequence[str]) -> list[str]:
    """Parse comma-separated names of arms, each once.

    Raises:
        UsageError: a name is unknown.
    """
    known = [*map(str, ArmName), *engines]
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"--arms must name arms of the benchmark, got '{name}'; {hint}")
    return names


def _run(config: "Config", plan: "SpeedPlan", engines: Engines) -> "SpeedReport":
    from pipeline.bench.speed.benchmark import run

    with _progress() as progress:
        return run(config, plan, engines, progress)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a transient progress bar on standard error."""
    from rich.progress import Progress

    with Progress(console=stderr_console(), transient=True) as bar:
        task = bar.add_task("loading the models", total=None)
        yield lambda what, done, steps: bar.update(task, description=what, completed=done, total=steps)


def _print(report: "SpeedReport", markdown: bool) -> None:
    from pipeline.bench.speed.report import as_markdown, show

    if markdown:
        typer.echo(as_markdown(report))
    else:
        show(report)
