"""The roofline: the time that a run would take if it consisted of its bare forward passes only.

The same passes are timed alone, in the same run, on rows of the run's mean length. The time of a pass of the run is
interpolated linearly by its rows and its tokens per row. Drafter passes count the rows that are still drafting, with
one token each; target passes count all tokens that they read. Prefill counts per token, measured on one prompt of mean
length.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.speed.work import Step, Work
from pipeline.assembly.models import Models
from stages.contract.blocks import SequenceState
from stages.engine.models.devices import synchronize
from stages.engine.models.language_model import LanguageModel
from stages.sampling.random_source import SeededRandomSource

SWEEPS = 7  # repetitions of every measurement, spread over the run


def interpolate(points: Mapping[int, float], at: float) -> float:
    """Linear interpolation between the nearest two points, constant outside them."""
    places = sorted(points)
    return float(np.interp(at, places, [points[place] for place in places]))


@dataclass(frozen=True)
class Costs:
    """Median seconds of bare forward passes."""

    target: Mapping[int, Mapping[int, float]]  # seconds of a target pass, by rows, then by tokens per row
    drafter: Mapping[int, float]  # seconds of a drafter pass of one token per row, by rows
    # reading_target, reading_drafter: seconds to prefill one prompt of mean length
    reading_target: float
    reading_drafter: float
    prompt_tokens: int  # target tokens of that prompt
    context: int  # tokens in the key-value cache of each row before the passes

    def target_pass(self, rows: int, tokens: int) -> float:
        """Seconds of a target pass over `tokens` tokens of all rows together."""
        return interpolate({count: interpolate(of, tokens / rows) for count, of in self.target.items()}, rows)

    def drafting(self, step: Step) -> float:
        """Seconds of the drafter passes of a step."""
        drawing = (sum(drafted > done for drafted in step.drafted) for done in range(max(step.drafted)))
        return sum(interpolate(self.drafter, rows) for rows in drawing)

    def verifying(self, step: Step) -> float:
        """Seconds of the target pass of a step, which reads one token per row in addition to the proposed ones."""
        return self.target_pass(len(step.proposed), sum(step.proposed) + len(step.proposed))


@dataclass(frozen=True)
class Roofline:
    """Seconds of prefill, drafting and verification if a run consisted of bare forward passes only."""

    reading: float
    drafting: float
    verifying: float

    @property
    def seconds(self) -> float:
        """Sum of the three parts."""
        return self.reading + self.drafting + self.verifying


def compute_roofline(work: Work, costs: Costs) -> Roofline:
    """The roofline of one round. The drafter prefills prompts only if it drafts."""
    drafts = any(any(step.drafted) for step in work.steps)
    prompts = work.prompt_tokens / costs.prompt_tokens
    return Roofline(
        reading=prompts * (costs.reading_target + drafts * costs.reading_drafter),
        drafting=sum(map(costs.drafting, work.steps)),
        verifying=sum(map(costs.verifying, work.steps)),
    )


def row_counts(batch: int) -> list[int]:
    """Powers of two up to the batch size, and the batch size."""
    return sorted({1 << power for power in range(batch.bit_length()) if 1 << power < batch} | {batch})


class CostMeter:
    """Times bare forward passes, one sweep over all points at a time, so that sweeps can be spread over a run.

    Args:
        models: models that no arm uses.
        batch: maximum number of rows.
        longest: maximum number of tokens per row in a target pass.
        prompt: target tokens and drafter pieces of a prompt of mean length.
        context: tokens in the key-value cache of each row before the passes, at least those of the prompt.
        clock: returns seconds.
    """

    def __init__(
        self,
        models: Models,
        batch: int,
        longest: int,
        prompt: tuple[Sequence[int], Sequence[int]],
        context: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._target, self._drafter, self._clock = models.target, models.drafter, clock
        self._rows, self._longest, self._prompt, self._context = row_counts(batch), longest, prompt, context
        self._samples: dict[tuple[bool, int, int], list[float]] = defaultdict(list)

    def sweep(self) -> None:
        """Time every point once."""
        for count in self._rows:
            self._measure(self._target, self._prompt[0], count, self._longest, hidden=False)
            self._measure(self._drafter, self._prompt[1], count, 1, hidden=True)

    def _measure(self, model: LanguageModel, prompt: Sequence[int], count: int, longest: int, *, hidden: bool) -> None:
        """Time passes over `count` rows with 1 to `longest` tokens; the entry for 0 tokens is prefill of one prompt."""
        context = min(self._context, model.max_length - longest)
        tokens = (list(prompt) * (context // len(prompt) + 2))[: context + longest]
        rows = [_row(number, tokens[: len(prompt)]) for number in range(count)]
        for row in rows:
            self._time(model, (hidden, count, 0), partial(model.admit, row, row.tokens))
        more = tokens[model.length(rows[0]) : context]
        if more:
            model.forward(rows, [more] * count, [1] * count)
        for width in range(1, longest + 1):
            new = [tokens[context : context + width]] * count
            self._time(model, (hidden, count, width), partial(model.forward, rows, new, [width] * count, hidden=hidden))
            for row in rows:
                model.roll_back(row, context)
        for row in rows:
            model.release(row)

    def _time(self, model: LanguageModel, point: tuple[bool, int, int], call: Callable[[], object]) -> None:
        synchronize(model.device)
        started = self._clock()
        call()
        synchronize(model.device)
        self._samples[point].append(self._clock() - started)

    def costs(self) -> Costs:
        """Medians over all sweeps so far; needs at least one."""
        found = {point: median(seconds) for point, seconds in self._samples.items()}
        target, drafter, widths = False, True, range(1, self._longest + 1)  # whether its hidden states are wanted
        return Costs(
            target={count: {width: found[target, count, width] for width in widths} for count in self._rows},
            drafter={count: found[drafter, count, 1] for count in self._rows},
            reading_target=found[target, self._rows[-1], 0],
            reading_drafter=found[drafter, self._rows[-1], 0],
            prompt_tokens=len(self._prompt[0]),
            context=self._context,
        )


def _row(number: int, tokens: list[int]) -> SequenceState:
    return SequenceState(number, "", "", "", tokens, len(tokens), [], SeededRandomSource(0, number), remaining_tokens=1)
