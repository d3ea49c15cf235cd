"""The speed benchmark: the same prompts, target and sampling with `transformers`, other engines and this pipeline.

`arms.py` defines arms, `plan.py` the number of their rounds, `build.py` builds arms,
`results.py` computes the results. This module chooses prompts and runs the arms in turn.

All arms run in one process, round by round in rotating order, so that noise of the machine affects them alike. An arm
is timed only while it runs. All results are paired measurements of the same prompts. At the end of a round the batch
drains, which wastes part of a batched forward pass; that affects all arms alike, and less in longer rounds.

If updates of the drafter are rarer than rounds, medians over rounds exclude the cost of learning; the overall results
include it. At the end of a round the benchmark waits for updates on the learner's thread. In a stream they would run
in parallel with the next prompts, so the learning arms are charged more than learning costs.
"""

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.speed.arms import (
    LEARNERS,
    OURS,
    Arm,
    ArmName,
    Engines,
    chunks,
    reads_all_with_drafter,
    reference_of,
)
from benchmarks.speed.build import Workshop
from benchmarks.speed.monitor import Monitor
from benchmarks.speed.plan import SpeedPlan
from benchmarks.speed.report import SpeedReport
from benchmarks.speed.results import ArmResults, differing, summarize_rounds
from benchmarks.speed.transformers_baselines import surprisal
from benchmarks.speed.work import MeasuredRound
from pipeline.assembly.admission import Admission
from pipeline.assembly.models import Models
from pipeline.config.settings import Config
from pipeline.reports.machine import machine_of
from pipeline.run.rounds import first_difference, rotate
from pipeline.sources.stream import Source, open_sources, stream
from stages.engine.models.huggingface import logit_difference
from store.errors import ConfigError, SourceError, UsageError
from store.events import PromptReceived, PromptRejected

REHEARSALS = 2  # untimed rounds of arms without state between prompts, enough for allocations
REHEARSED = 48  # maximum untimed prompts of our arms without learning, until n-grams and estimates settle


def shortest_context(models: Models, arms: Iterable[str]) -> int:
    """Return the number of tokens that a prompt and its completion may have in all of these arms."""
    lengths = [models.target.max_length]
    if any(map(reads_all_with_drafter, arms)):
        lengths.append(models.drafter.max_length)
    return min(lengths)


def choose_prompts(
    sources: Sequence[Source], config: Config, models: Models, number: int, most: int
) -> list[PromptReceived]:
    """The first `number` prompts of the stream that every arm can complete.

    Args:
        most: tokens that every prompt leaves space for two longest completions in.

    Raises:
        ConfigError: as `Admission`.
        SourceError: the sources have fewer such prompts.
    """
    encode = Admission(config, models).encode

    def fits(event: PromptReceived | PromptRejected) -> bool:
        if isinstance(event, PromptRejected):
            return False
        try:
            longest = max(map(len, encode(event)))
        except ConfigError:  # the chat template makes no prompt of it
            return False
        return longest + 2 * config.sampling.max_new_tokens < most

    chosen = [event for event in islice(filter(fits, stream(sources)), number) if isinstance(event, PromptReceived)]
    if len(chosen) < number:
        named = ", ".join(config.sources)
        hint = "Name more sources, or reduce the number of prompts or the warm-up."
        raise SourceError(f"The benchmark needs {number} prompts, {named} has {len(chosen)} that fit. {hint}")
    return chosen


def measure(
    arms: Mapping[str, Arm],
    prompts: Sequence[PromptReceived],
    plan: SpeedPlan,
    monitor: Monitor,
) -> dict[str, list[MeasuredRound]]:
    """Warm up all arms on the first prompts, then run each round with all arms in rotating order.

    Returns:
        the timed rounds of each arm. After Ctrl-C these are the rounds that all arms have finished.

    Raises:
        KeyboardInterrupt: on Ctrl-C before all arms have finished a round.
    """
    rehearsed, timed = (chunks(part, plan.round_prompts) for part in (prompts[: plan.warm_up], prompts[plan.warm_up :]))
    few = {name: -(-REHEARSED // plan.round_prompts) if name in OURS else REHEARSALS for name in arms}
    for number, (name, arm) in enumerate(arms.items(), start=1):
        before = rehearsed if name in LEARNERS else rehearsed[-few[name] :]
        monitor.start_step("warm-up", f"{name}, {sum(map(len, before))} prompts", number, len(arms))
        for chunk in before:
            arm.complete(chunk)
    found: dict[str, list[MeasuredRound]] = {name: [] for name in arms}
    monitor.start_step("measuring", f"{len(timed)} rounds of {plan.round_prompts} prompts in {len(arms)} arms")
    try:
        for number, chunk in enumerate(timed):
            for name in rotate(list(arms), number):
                found[name].append(arms[name].complete(chunk))
                monitor.finish_turn(name, found, len(timed))
    except KeyboardInterrupt:
        complete = min(map(len, found.values()))
        if not complete:
            raise
        return {name: rounds[:complete] for name, rounds in found.items()}
    return found


def run(config: Config, plan: SpeedPlan, engines: Engines, monitor: Monitor) -> SpeedReport:
    """Load the models, choose prompts, measure all arms and compare them with `plain`, or else with the first arm.

    Raises:
        ModelError, VocabularyError: as `load_models`.
        SourceError: as `choose_prompts`.
        KeyboardInterrupt: on Ctrl-C before all arms have finished a round. Later, the report is of the finished rounds.
    """
    monitor.start_step("loading the models", f"{config.targets[0]}, {config.drafter}")
    sources = open_sources(config.sources, config.source, seed=config.seed)
    # After Ctrl-C a thread of the log may still write.
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch, _closing_arms() as open_arms:
        workshop = Workshop(config, Path(scratch))
        context = shortest_context(workshop.models, plan.arms)
        prompts = choose_prompts(sources, config, workshop.models, plan.warm_up + plan.prompts, context)
        longest = max(len(workshop.words.encode(prompt)) for prompt in prompts) + config.sampling.max_new_tokens
        arms, refused = _make_arms(workshop, plan, engines, longest, open_arms, monitor)
        machine = machine_of(workshop.models)
        rounds = measure(arms, prompts, plan, monitor)
        complete = len(next(iter(rounds.values())))
        monitor.start_step("computing the results", f"{complete} of {plan.rounds} rounds")
        peak = _peak_memory()
        timed = chunks(prompts[plan.warm_up :], plan.round_prompts)[:complete]
        compared = compare(rounds, timed, workshop, config.sampling.temperature)
        if complete < plan.rounds:
            _close_interrupted(open_arms)
        chat = Admission(config, workshop.models).describe()
    return SpeedReport(
        machine=machine,
        settings=settings_of(config, plan),
        labels={name: engines.label(name) for name in plan.arms if name not in tuple(ArmName)},
        reference=reference_of(list(arms)),
        results=compared,
        rounds=rounds,
        planned=plan.rounds,
        peak_memory=peak,
        refused=refused,
        chat=chat,
    )


def _make_arms(
    workshop: Workshop, plan: SpeedPlan, engines: Engines, longest: int, open_arms: ExitStack, monitor: Monitor
) -> tuple[dict[str, Arm], dict[str, str]]:
    """Build the arms of the plan; `open_arms` closes them.

    Returns:
        the arms by name, and the reasons of engines that cannot run this pair of models.

    Raises:
        UsageError: no arm can run this pair.
    """
    arms: dict[str, Arm] = {}
    refused: dict[str, str] = {}
    for number, name in enumerate(plan.arms, start=1):
        monitor.start_step("loading the arms", name, number, len(plan.arms))
        try:
            arms[name] = workshop.make(name, longest, engines)
            open_arms.callback(arms[name].close)
        except UsageError as error:
            if name in tuple(ArmName):
                raise
            refused[name] = str(error)
    if not arms:
        raise UsageError("At least one arm must run this pair: " + "; ".join(refused.values()))
    return arms, refused


@contextmanager
def _closing_arms() -> Iterator[ExitStack]:
    """Close the arms at the end of the block, also after Ctrl-C."""
    with ExitStack() as arms:
        try:
            yield arms
        except KeyboardInterrupt:
            _close_interrupted(arms)
            raise


def _close_interrupted(arms: ExitStack) -> None:
    """Close the arms. One that was interrupted inside a block may fail to; its results are not used."""
    with suppress(Exception):
        arms.pop_all().close()


def compare(
    rounds: Mapping[str, list[MeasuredRound]],
    prompts: Sequence[Sequence[PromptReceived]],
    workshop: Workshop,
    temperature: float,
) -> dict[str, ArmResults]:
    """Compare every arm with the reference. Surprisal, or the logits where greedy texts diverge, is from the target."""
    encode, reference = workshop.words.encode, rounds[reference_of(tuple(rounds))]
    encoded = [[encode(prompt) for prompt in chunk] for chunk in prompts]
    if temperature > 0:
        scored = {name: _with_nats(own, encoded, workshop.target, temperature) for name, own in rounds.items()}
        return {name: summarize_rounds(own, reference, greedy=False) for name, own in scored.items()}
    return {
        name: summarize_rounds(
            own, reference, greedy=True, widest_difference=_widest(own, reference, encoded, workshop.target)
        )
        for name, own in rounds.items()
    }


def _with_nats(
    rounds: Sequence[MeasuredRound], encoded: Sequence[Sequence[Sequence[int]]], target: Any, temperature: float
) -> list[MeasuredRound]:
    """The rounds with the surprisal of each completion under the target, in nats."""
    return [
        replace(one, nats=tuple(surprisal(target, *pair, temperature) for pair in zip(ids, one.tokens, strict=True)))
        for one, ids in zip(rounds, encoded, strict=True)
    ]


def _widest(
    own: Sequence[MeasuredRound],
    reference: Sequence[MeasuredRound],
    encoded: Sequence[Sequence[Sequence[int]]],
    target: Any,
) -> float | None:
    """Largest difference of the target's logits between the two tokens at which texts diverge; None if none do. A text
    that is the beginning of the other does not diverge."""
    found = []
    for number, place in differing(own, reference):
        ours, theirs = own[number].tokens[place], reference[number].tokens[place]
        same = first_difference(ours, theirs)
        if same is not None:
            text = [*encoded[number][place], *ours[:same]]
            found.append(abs(logit_difference(target, text, ours[same], theirs[same])))
    return max(found, default=None)


def settings_of(config: Config, plan: SpeedPlan) -> dict[str, Any]:
    """All settings that are needed to repeat the measurement, as JSON values."""
    sizes = {"prompts": plan.prompts, "warm_up": plan.warm_up, "round_prompts": plan.round_prompts}
    return config.model_dump(mode="json") | sizes


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
