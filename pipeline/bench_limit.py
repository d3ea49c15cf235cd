"""The limit: what a run would have cost with nothing but its forward passes, each measured bare.

The same passes are timed without a pipeline around them, in the same run, on rows of as many tokens as the run's rows
have on average. A pass of the run is priced by its rows and its tokens per row, between the measured points
linearly. Drafter passes are priced by the rows that were still drafting, at one token each; target passes by all
tokens that they read. Reading the prompts is priced per token, by reading one prompt of mean length.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

from pipeline.bench_arms import Step, Work
from pipeline.build_models import Models
from stages.baselines import settle
from stages.blocks import Row
from stages.draws import SeededDraws
from stages.language_model import LanguageModel

SWEEPS = 7  # repeats of every measurement, spread over the run


def interpolate(points: Mapping[int, float], at: float) -> float:
    """The value between the nearest two points, linearly; at the end points outside them."""
    places = sorted(points)
    right = bisect_right(places, at)
    if right in (0, len(places)):
        return points[places[max(0, right - 1)]]
    low, high = places[right - 1], places[right]
    share = (at - low) / (high - low)
    return (1 - share) * points[low] + share * points[high]


@dataclass(frozen=True)
class Costs:
    """Seconds of bare forward passes, medians.

    Attributes:
        target: by rows, then by tokens of each row.
        drafter: by rows, one token of each.
        reading_target, reading_drafter: of one prompt of mean length.
        prompt_tokens: the target's tokens of that prompt.
        context: tokens of each row before the passes.
    """

    target: Mapping[int, Mapping[int, float]]
    drafter: Mapping[int, float]
    reading_target: float
    reading_drafter: float
    prompt_tokens: int
    context: int

    def target_pass(self, rows: int, tokens: int) -> float:
        """Seconds of a target pass over that many tokens of all rows together."""
        return interpolate({count: interpolate(of, tokens / rows) for count, of in self.target.items()}, rows)

    def drafting(self, step: Step) -> float:
        """Seconds of a step's drafter passes."""
        drawing = (sum(drafted > done for drafted in step.drafted) for done in range(max(step.drafted)))
        return sum(interpolate(self.drafter, rows) for rows in drawing)

    def verifying(self, step: Step) -> float:
        """Seconds of a step's target pass, which reads one token of each row beside the proposed ones."""
        return self.target_pass(len(step.proposed), sum(step.proposed) + len(step.proposed))


@dataclass(frozen=True)
class Limit:
    """Seconds that a run would have taken with nothing but its forward passes."""

    reading: float
    drafting: float
    verifying: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.reading + self.drafting + self.verifying


def limit_of(work: Work, costs: Costs) -> Limit:
    """The limit of one round. The drafter has to read prompts only where it drafts."""
    drafts = any(any(step.drafted) for step in work.steps)
    prompts = work.prompt_tokens / costs.prompt_tokens
    return Limit(
        reading=prompts * (costs.reading_target + drafts * costs.reading_drafter),
        drafting=sum(map(costs.drafting, work.steps)),
        verifying=sum(map(costs.verifying, work.steps)),
    )


def row_counts(batch: int) -> list[int]:
    """1, 2, 4 and so on up to the batch, and the batch."""
    return sorted({1 << power for power in range(batch.bit_length()) if 1 << power < batch} | {batch})


class CostMeter:
    """Times bare forward passes, one sweep over all points at a time, so that sweeps can be spread over a run.

    Args:
        models: whose rows are nobody else's.
        batch: most rows.
        longest: most tokens of each row in a target pass.
        prompt: target tokens and drafter pieces of the prompt that stands for all.
        context: tokens of each row before the passes, at least as many as the prompt has.
        clock: seconds.
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
        self._target_samples: dict[tuple[int, int], list[float]] = {}
        self._drafter_samples: dict[tuple[int, int], list[float]] = {}

    def sweep(self) -> None:
        """Time every point once."""
        for count in self._rows:
            self._measure(self._target, self._prompt[0], count, self._longest, self._target_samples, hidden=False)
            self._measure(self._drafter, self._prompt[1], count, 1, self._drafter_samples, hidden=True)

    def _measure(
        self,
        model: LanguageModel,
        prompt: Sequence[int],
        count: int,
        longest: int,
        samples: dict[tuple[int, int], list[float]],
        *,
        hidden: bool,
    ) -> None:
        """Passes over `count` rows of 1 to `longest` tokens; at 0 tokens, the reading of one prompt."""
        tokens = (list(prompt) * (self._context // len(prompt) + 2))[: self._context + longest]
        rows = [_row(number, tokens[: len(prompt)]) for number in range(count)]
        for row in rows:
            self._time(model, samples, (count, 0), partial(model.admit, row, row.tokens))
        more = tokens[model.length(rows[0]) : self._context]
        if more:
            model.forward(rows, [more] * count, [1] * count)
        for width in range(1, longest + 1):
            new = [tokens[self._context : self._context + width]] * count
            self._time(
                model, samples, (count, width), partial(model.forward, rows, new, [width] * count, hidden=hidden)
            )
            for row in rows:
                model.roll_back(row, self._context)
        for row in rows:
            model.release(row)

    def _time(
        self,
        model: LanguageModel,
        samples: dict[tuple[int, int], list[float]],
        point: tuple[int, int],
        call: Callable[[], object],
    ) -> None:
        settle(model.device)
        started = self._clock()
        call()
        settle(model.device)
        samples.setdefault(point, []).append(self._clock() - started)

    def costs(self) -> Costs:
        """Medians of all sweeps so far, at least one."""
        target = {point: median(seconds) for point, seconds in self._target_samples.items()}
        drafter = {point: median(seconds) for point, seconds in self._drafter_samples.items()}
        widths = range(1, self._longest + 1)
        return Costs(
            target={count: {width: target[count, width] for width in widths} for count in self._rows},
            drafter={count: drafter[count, 1] for count in self._rows},
            reading_target=target[self._rows[-1], 0],
            reading_drafter=drafter[self._rows[-1], 0],
            prompt_tokens=len(self._prompt[0]),
            context=self._context,
        )


def _row(number: int, tokens: list[int]) -> Row:
    return Row(number, "", "", "", tokens, len(tokens), [], SeededDraws(0, number), room=1)
