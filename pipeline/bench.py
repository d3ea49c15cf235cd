"""The benchmark: the same prompts, target and sampling through `transformers` and through this pipeline, side by side.

`bench_arms.py` says what an arm is, `bench_rounds.py` how they take turns, `bench_limit.py` what the forward passes
alone would cost, `bench_figures.py` what is made of the measurements; this file runs them.
"""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.bench_arms import Arm, ArmName, Engines, Round, chunks
from pipeline.bench_build import Workshop
from pipeline.bench_figures import Figures, differing, figures
from pipeline.bench_limit import SWEEPS, CostMeter, Costs
from pipeline.bench_pipeline import PipelineArm
from pipeline.bench_report import Memory, Report
from pipeline.bench_rounds import Plan, Progress, choose_prompts, measure
from pipeline.build_models import Models
from pipeline.config import Config
from pipeline.source import open_sources
from stages.baselines import device_name, preference, surprisal, threads
from stages.measured import processor
from stages.vocabulary import Vocabulary
from store.errors import UsageError
from store.events import PromptReceived


def run(config: Config, plan: Plan, engines: Engines, progress: Progress) -> Report:
    """Load, choose prompts, measure, compare. The reference is `plain`, or the first arm if that is left out.

    Args:
        config: models, sources, sampling and batch. Where versions are published and kept is the arms' matter.
        plan: how much is measured. Its arms are usable at this batch.
        engines: others that run on this machine.
        progress: see `measure`.

    Raises:
        ModelError, VocabularyError: as `load_models`.
        SourceError: as `choose_prompts`.
    """
    sources = open_sources(config.sources, config.source, seed=config.seed)
    with TemporaryDirectory() as scratch, ExitStack() as open_arms:
        workshop = Workshop(config, Path(scratch))
        prompts = choose_prompts(sources, config, workshop.models, plan.warm_up + plan.prompts)
        longest = max(len(workshop.models.target_words.encode(prompt.text)) for prompt in prompts)
        arms: dict[str, Arm] = {}
        refused: dict[str, str] = {}
        for name in plan.arms:
            try:
                arms[name] = workshop.make(name, longest + config.sampling.max_new_tokens, engines)
                open_arms.callback(arms[name].close)
            except UsageError as error:  # an engine that cannot do this pair: that is its outcome
                if name in tuple(ArmName):
                    raise
                refused[name] = str(error)
        if not arms:
            raise UsageError("At least one arm must run this pair: " + "; ".join(refused.values()))
        machine = machine_of(workshop.models)
        meter = meter_of(config, workshop.models, prompts[plan.warm_up :])
        rounds = measure(arms, prompts, plan, progress, lambda number: _sweep(meter, number, plan.rounds))
        caches = {name: arm.cache_bytes for name, arm in arms.items() if isinstance(arm, PipelineArm)}
        memory = Memory(peak_bytes(), caches)
        costs, timed = meter.costs(), chunks(prompts[plan.warm_up :], plan.round_prompts)
        compared = compare(rounds, timed, costs, workshop, config.sampling.temperature)
    labels = {name: engines.label(name) for name in plan.arms if name not in tuple(ArmName)}
    settings, reference = settings_of(config, plan), reference_of(list(arms))
    return Report(machine, settings, labels, reference, compared, rounds, costs, memory, refused)


def reference_of(arms: Sequence[str]) -> str:
    """The arm that others are compared with."""
    return ArmName.PLAIN if ArmName.PLAIN in arms else arms[0]


def _sweep(meter: CostMeter, number: int, rounds: int) -> None:
    """All sweeps are spread evenly over the rounds, at the beginning of each share."""
    for _ in range(SWEEPS * number // rounds, SWEEPS * (number + 1) // rounds):
        meter.sweep()


def meter_of(config: Config, models: Models, prompts: Sequence[PromptReceived]) -> CostMeter:
    """A meter at the mean length of these prompts, half of a longest completion behind them."""
    encoded = [_of_mean_length([words.encode(prompt.text) for prompt in prompts]) for words in _vocabularies(models)]
    context = len(encoded[0]) + config.sampling.max_new_tokens // 2
    longest = max(config.draft.max_draft, config.draft.max_lookup if config.draft.lookup else 0)
    return CostMeter(models, config.batch, longest + 1, (encoded[0], encoded[1]), context)


def _vocabularies(models: Models) -> tuple[Vocabulary, Vocabulary]:
    return models.target_words, models.drafter_words


def _of_mean_length(texts: Sequence[list[int]]) -> list[int]:
    """The text whose length is nearest to the mean."""
    wanted = fmean(map(len, texts))
    return min(texts, key=lambda text: abs(len(text) - wanted))


def compare(
    rounds: Mapping[str, list[Round]],
    prompts: Sequence[Sequence[PromptReceived]],
    costs: Costs,
    workshop: Workshop,
    temperature: float,
) -> dict[str, Figures]:
    """Every arm's figures against the reference's. Surprisal, or where greedy texts part, is looked up in the target.

    Args:
        rounds: of every arm, as measured.
        prompts: of every round.
        costs: of bare forward passes.
        workshop: has the target.
        temperature: 0 is greedy.
    """
    encode, reference = workshop.models.target_words.encode, rounds[reference_of(tuple(rounds))]
    encoded = [[encode(prompt.text) for prompt in chunk] for chunk in prompts]
    if temperature > 0:
        scored = {name: _with_nats(own, encoded, workshop.target, temperature) for name, own in rounds.items()}
        return {name: figures(own, reference, costs, greedy=False) for name, own in scored.items()}
    return {
        name: figures(
            own, reference, costs, greedy=True, widest_difference=_widest(own, reference, encoded, workshop.target)
        )
        for name, own in rounds.items()
    }


def _with_nats(
    rounds: Sequence[Round], encoded: Sequence[Sequence[Sequence[int]]], target: Any, temperature: float
) -> list[Round]:
    """The rounds with the surprisal of every completion under the target."""
    return [
        replace(one, nats=tuple(surprisal(target, *pair, temperature) for pair in zip(ids, one.tokens, strict=True)))
        for one, ids in zip(rounds, encoded, strict=True)
    ]


def _widest(
    own: Sequence[Round], reference: Sequence[Round], encoded: Sequence[Sequence[Sequence[int]]], target: Any
) -> float | None:
    """The target's largest preference for one of the two tokens where texts part; texts of which one begins the other
    do not part."""
    found = []
    for number, place in differing(own, reference):
        ours, theirs = own[number].tokens[place], reference[number].tokens[place]
        same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if same is not None:
            text = [*encoded[number][place], *ours[:same]]
            found.append(abs(preference(target, text, ours[same], theirs[same])))
    return max(found, default=None)


def machine_of(models: Models) -> dict[str, Any]:
    """What the figures depend on beside the settings. `load`: processes that wanted a core in the last minute."""
    return {
        "device": device_name(models.target.device) or processor(),
        "cores": os.cpu_count(),
        "threads": threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "target_parameters": models.target.parameters,
        "drafter_parameters": models.drafter.parameters,
        "target_forward": models.target.forward_pass.name,
        "drafter_forward": models.drafter.forward_pass.name,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def peak_bytes() -> int | None:
    """Most memory that this process ever held, all arms together; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def settings_of(config: Config, plan: Plan) -> dict[str, Any]:
    """All that is needed to run it again."""
    sizes = {"prompts": plan.prompts, "warm_up": plan.warm_up, "round_prompts": plan.round_prompts}
    return config.model_dump(mode="json") | sizes
