"""Compare the plugin's drafts inside vLLM with vLLM's own: `python -m benchmarks.vllm SOURCE --model MODEL`.

The arms answer rounds of prompts in turn, each in an engine of its own, so that a change of the machine's speed meets
all of them.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.speed.__main__ import parse_batches
from benchmarks.vllm.arms import ARMS, DEFAULT, ArmRequest
from benchmarks.vllm.engine import EngineSpec, RoundRequest
from benchmarks.vllm.report import ArmRounds, make_json, make_table
from benchmarks.vllm.worker import EngineWorker
from pipeline.config.sections import SourceSettings
from pipeline.sources.stream import open_sources, stream
from store.errors import UsageError
from store.events import PromptReceived

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the proposer is measured in the engine's process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


def bench(
    sources: Annotated[list[str], typer.Argument(help="Prompt sources, as for `omnidraft replay`.")],
    model: Annotated[str, typer.Option(help="Target, as vLLM names it.")],
    where: Annotated[list[str] | None, typer.Option(help="Keep rows with this COLUMN=VALUE.")] = None,
    arms: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(ARMS)}.")] = ",".join(DEFAULT),
    batch: Annotated[str, typer.Option(help="Requests at a time; comma-separated sizes are measured in turn.")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each arm.")] = 8,
    round_prompts: Annotated[int, typer.Option(min=1, help="Prompts per round.")] = 8,
    warm_up: Annotated[int, typer.Option(min=1, help="Prompts of each arm before the rounds, not measured.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a completion.")] = 64,
    drafts: Annotated[int, typer.Option(min=1, help="Maximum drafted tokens per request and pass.")] = 8,
    model_drafts: Annotated[int, typer.Option(min=1, help="The same of vLLM's draft-model mode.")] = 4,
    drafter: Annotated[str, typer.Option(help="Drafter model of the arms with a model.")] = "builtin:drafter-4m",
    chat: Annotated[bool, typer.Option(help="Render prompts with the target's chat template.")] = True,
    engine: Annotated[str, typer.Option(help="Further arguments of vllm.LLM, as JSON.")] = "{}",
    output: Annotated[Path | None, typer.Option(help="Write everything that was measured here, as JSON.")] = None,
) -> None:
    """Measure tokens per pass and per second of the plugin, and of vLLM's own drafts, with the same prompts."""
    chosen = choose_arms(arms)
    options = parse_engine_options(engine)
    sizes = parse_batches(batch)
    found = read_prompts(sources, where or [], rounds * round_prompts + warm_up)
    first, found = found[-warm_up:], found[:-warm_up]  # so the measured ones do not depend on their number
    of_rounds = [found[begin : begin + round_prompts] for begin in range(0, len(found), round_prompts)]
    measured: list[dict[str, Any]] = []
    for size in sizes:
        with TemporaryDirectory() as folder:
            request = ArmRequest(drafts, model_drafts, drafter, Path(folder))
            every = [first, *of_rounds]
            for results in run_rounds(model, size, request, chosen, options, every, tokens, chat=chat):
                if output:
                    output.write_text(json.dumps([*measured, make_json(size, results)]), encoding="utf-8")
        measured.append(make_json(size, results))
        print(make_table(size, results).markdown(), flush=True)


def choose_arms(names: str) -> list[str]:
    """Return the named arms.

    >>> choose_arms("plain,memory")
    ['plain', 'memory']

    Raises:
        UsageError: there is no such arm.
    """
    chosen = names.split(",")
    if unknown := [name for name in chosen if name not in ARMS]:
        raise UsageError(f"--arms must be of {', '.join(ARMS)}; got {', '.join(unknown)}")
    return chosen


def parse_engine_options(text: str) -> dict[str, Any]:
    """Return the further arguments of vllm.LLM.

    >>> parse_engine_options('{"dtype": "float32"}')
    {'dtype': 'float32'}

    Raises:
        UsageError: the text is not a JSON object.
    """
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--engine must be a JSON object: {error}") from error
    if not isinstance(options, dict):
        raise UsageError(f"--engine must be a JSON object; got {text}")
    return options


def read_prompts(sources: Sequence[str], where: Sequence[str], number: int) -> list[str]:
    """Return so many prompts.

    Raises:
        UsageError: there are fewer.
        OmnidraftError: a source cannot be read.
    """
    found: list[str] = []
    for event in stream(open_sources(sources, SourceSettings(where=tuple(where), limit=number))):
        if isinstance(event, PromptReceived) and len(found) < number:
            found.append(event.text)
    if len(found) < number:
        raise UsageError(f"the sources must have {number} prompts, got {len(found)}; measure fewer rounds")
    return found


def start_worker(model: str, batch: int, name: str, request: ArmRequest, options: dict[str, Any]) -> EngineWorker:
    """Start the engine of an arm. On the CPU backend it needs its OpenMP library to be loaded first."""
    arm = ARMS[name](request)
    library = next(Path(sys.prefix).glob("lib/libiomp5.so"), None)
    preload = {"LD_PRELOAD": str(library)} if library else {}
    defaults = {name: value for name, value in CPU_ENVIRONMENT.items() if name not in os.environ}
    spec = EngineSpec(model, batch, arm.speculative, options)
    environment = ENVIRONMENT | defaults | preload | arm.environment()
    return EngineWorker(spec, environment, request.folder / f"{name}.log")


def run_rounds(
    model: str,
    batch: int,
    request: ArmRequest,
    names: Sequence[str],
    options: dict[str, Any],
    rounds: Iterable[list[str]],
    tokens: int,
    *,
    chat: bool,
) -> Iterator[dict[str, ArmRounds]]:
    """Run the arms' rounds in turn, and yield the results so far after each. The first round is not timed.

    Their order is drawn for each round: a learner may still train when the next arm begins.

    Raises:
        UsageError: an engine does not start, or ended.
    """
    results = {name: ArmRounds() for name in names}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(start_worker(model, batch, name, request, options)) for name in names}
        for worker in workers.values():
            worker.wait_until_ready()
        for number, prompts in enumerate(rounds):
            for name in Random(number).sample(list(names), len(names)):
                result = workers[name].complete(RoundRequest(prompts, tokens, chat))
                if number:
                    results[name].rounds.append(result)
                    print(f"round {number}, {name}: {result.emitted / result.seconds:.1f} tokens/s", file=sys.stderr)
            yield results


if __name__ == "__main__":
    run(bench)
