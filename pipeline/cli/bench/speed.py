"""The command `omnidraft bench`: tokens per second next to `transformers` and other engines, on the same prompts."""

import json
import logging
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pipeline.bench.speed.arms import ON_REQUEST, ArmName, Engines, arms_at, require_usable
from pipeline.bench.speed.plan import FULL, QUICK, PlanDefaults, SpeedPlan
from pipeline.config.cli_options import (
    MOST_TOKENS,
    ChatOption,
    DeviceOption,
    DrafterOption,
    DtypeOption,
    JsonOption,
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
from pipeline.reports.terminal import require_file
from store.errors import UsageError

if TYPE_CHECKING:
    from pipeline.bench.speed.report import SpeedReport
    from pipeline.config.settings import Config

LOG = logging.getLogger("omnidraft.bench")

_DRAFT_HELP = "Most pieces drafted per block, in all arms except assisted-defaults."
_ROUND_HELP = "Prompts per round. [default: twice the batch, at least 8; with --quick the batch, at least 3]"
_WARM_UP_HELP = "Untimed prompts before the timed ones, to learn from. [default: 42; with --quick 3]"
_QUICK_HELP = (
    "Short measurement: 4 rounds of 3 prompts of up to 32 tokens with the arms plain, own-plain, memory and logged, "
    "and those of other engines. Meant for three minutes with a target of 135M parameters on two cores. "
    "Quartiles are rough, and so few prompts teach the drafter nothing. Options for sizes and arms override it."
)
_GGUF_HELP = (
    "Include llama.cpp, built in this folder. It reads a target in a GGUF file as it is, any other target converted to "
    "the data type of the other arms."
)


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
        int | None, option("sampling.max_new_tokens", f"{MOST_TOKENS} [default: 64; with --quick 32]")
    ] = None,
    temperature: Annotated[float, option("sampling.temperature", "Temperature of the target; 0 is greedy.")] = 0.0,
    max_draft: Annotated[int, option("draft.max_draft", _DRAFT_HELP)] = 5,
    draft_sources: SourcesOption = None,
    threads: ThreadsOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    seed: Annotated[int, option("seed", "Seed of all random draws.")] = 0,
    template: TemplateOption = None,
    chat: ChatOption = None,
    where: Annotated[
        list[str] | None,
        option("source.where", "Condition 'column=value' or 'column!=value' on the rows of the sources."),
    ] = None,
    settings: SetOption = None,
    arms: Annotated[
        str | None, typer.Option(help="Arms to compare, comma-separated. Default: all that can run.")
    ] = None,
    openvino: Annotated[bool, typer.Option("--openvino", help="Include OpenVINO GenAI, if it is installed.")] = False,
    openvino_weights: Annotated[
        Literal["float32", "int8", "int4"],
        typer.Option(help="Format of the target's weights in OpenVINO GenAI. Other formats than float32 need NNCF."),
    ] = "float32",
    llama_cpp: Annotated[Path | None, typer.Option(help=_GGUF_HELP)] = None,
    json_file: JsonOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Measure tokens per second on the same prompts: `transformers` (plain, assisted, prompt lookup, continuous
    batching), other engines, and this pipeline (plain, frozen, learning, learning with its log).

    All arms run in one process and take turns, round by round, on the same prompts. Ctrl-C prints the tables of the
    rounds that all arms have finished.
    """
    defaults = QUICK if quick else FULL
    require_file("--json", json_file)
    lengths = {"sampling.max_new_tokens": defaults.max_new_tokens}
    overrides = lengths | overrides_of(bench, locals()) | parse_settings(settings)
    engines = _engines(openvino, llama_cpp, openvino_weights)
    plans = _plans(overrides, _batches(batch), arms, engines, (prompts, round_prompts, warm_up), defaults)
    _run_all(plans, engines, json_file, markdown)


def _run_all(
    plans: Sequence[tuple["Config", SpeedPlan]], engines: Engines, json_file: Path | None, markdown: bool
) -> None:
    """Measure one batch size after another. Writes all results after each one, in case the next is interrupted.

    Raises:
        typer.Exit: with status 130, after Ctrl-C; the results so far are printed and written.
    """
    runs = []
    for config, plan in plans:
        try:
            report = _run(config, plan, engines)
        except KeyboardInterrupt:
            LOG.warning("interrupted before the results of a finished round were computed: there are no tables to show")
            raise typer.Exit(130) from None
        _print(report, markdown)
        runs.append(report.to_json())
        if json_file is not None:
            json_file.write_text(json.dumps({"runs": runs}, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        if report.partial:
            raise typer.Exit(130)


def _batches(text: str) -> list[int]:
    """Parse comma-separated batch sizes, each once.

    Raises:
        UsageError: one of them is not a whole number from 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--batch must be comma-separated numbers from 1, such as 1,4,8, got '{text}'")
    return [int(part) for part in dict.fromkeys(parts)]


def _engines(openvino: bool, llama_cpp: Path | None, openvino_weights: str) -> Engines:
    """The engines that the options name."""
    from pipeline.bench.engines.engines import find_engines

    return find_engines(openvino=openvino, llama_cpp=llama_cpp, openvino_weights=openvino_weights)


def _plans(
    overrides: dict[str, Any],
    batches: Sequence[int],
    arms: str | None,
    engines: Engines,
    sizes: tuple[int | None, int | None, int | None],
    defaults: PlanDefaults,
) -> list[tuple["Config", SpeedPlan]]:
    """Configuration and plan of every batch size, checked before anything is loaded.

    Raises:
        UsageError: there are several targets, or an arm cannot run.
    """
    from pipeline.config.settings import Config

    plans, (prompts, round_prompts, warm_up) = [], sizes
    for batch in batches:
        config = Config().with_overrides(overrides | {"batch": batch})
        if len(config.targets) > 1 or config.swaps:
            raise UsageError(f"the benchmark must have one target, got {', '.join(config.targets)}; run it for each")
        temperature = config.sampling.temperature
        known = engines.names(1, temperature)
        default = [
            name for name in arms_at(batch, temperature, engines, quick=defaults is QUICK) if name not in ON_REQUEST
        ]
        names = _names(arms, known) if arms else default
        require_usable(names, batch, temperature, engines)
        plans.append((config, SpeedPlan.from_options(names, batch, prompts, round_prompts, warm_up, defaults=defaults)))
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


def _run(config: "Config", plan: SpeedPlan, engines: Engines) -> "SpeedReport":
    from pipeline.bench.speed.benchmark import run
    from pipeline.bench.speed.monitor import open_monitor

    with open_monitor() as monitor:
        return run(config, plan, engines, monitor)


def _print(report: "SpeedReport", markdown: bool) -> None:
    from pipeline.bench.speed.report import as_markdown, show

    if markdown:
        typer.echo(as_markdown(report))
    else:
        show(report)
