"""llama.cpp on the same GGUF file: `python -m benchmarks.engines FILE --target T.gguf --llama-cpp DIR`."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import JsonOption, run
from benchmarks.engines.engines import OtherEngines
from benchmarks.engines.llamacpp import find_llama_cpp
from benchmarks.speed.__main__ import run_all
from benchmarks.speed.arms import ArmName, require_usable
from benchmarks.speed.plan import FULL, QUICK, SpeedPlan
from pipeline.config.cli_options import SetOption, TargetOption, argument, option, overrides_of, parse_settings
from pipeline.config.settings import Config
from pipeline.reports.terminal import require_file


def engines(
    sources: Annotated[list[str] | None, argument("sources", "Prompt sources, as for `replay`.", "SOURCE")] = None,
    target: TargetOption = None,
    llama_cpp: Annotated[Path, typer.Option(help="Folder in which llama.cpp was built.")] = Path("llama.cpp"),
    llama_draft: Annotated[Path | None, typer.Option(help="GGUF file that llama.cpp may draft with.")] = None,
    arms: Annotated[str | None, typer.Option(help="Arms to compare, comma-separated. Default: all.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Timed prompts, rounded up to whole rounds.")] = None,
    warm_up: Annotated[int | None, typer.Option(min=0, help="Untimed prompts before them.")] = None,
    batch: Annotated[int, option("batch")] = 1,
    max_new_tokens: Annotated[int, option("sampling.max_new_tokens")] = 64,
    settings: SetOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="4 rounds of 3 prompts.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Measure tokens per second of llama.cpp, with each kind of its speculation, next to plain decoding, the memory,
    and all that `replay` does, on the same GGUF file."""
    require_file("--json", json_file)
    found = OtherEngines(find_llama_cpp(llama_cpp), llama_draft)
    config = Config().with_overrides(overrides_of(engines, locals()) | parse_settings(settings))
    every = (ArmName.OWN_PLAIN, ArmName.MEMORY, ArmName.LOGGED, *found.names(batch, config.sampling.temperature))
    names = every if arms is None else tuple(name.strip() for name in arms.split(","))
    require_usable(names, batch, config.sampling.temperature, found)
    plan = SpeedPlan.from_options(names, batch, prompts, warm_up=warm_up, defaults=QUICK if quick else FULL)
    run_all([(config, plan)], found, json_file)


if __name__ == "__main__":
    run(engines)
