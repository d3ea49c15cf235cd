"""Rounds: which prompts are measured, and in which order the arms complete them.

All arms run in one process, round by round in rotating order, so that noise from outside hits them alike; an arm is
timed only while it works. Every figure comes from paired measurements of the same prompts. At the end of a round the
batch runs empty, which wastes part of a batched forward pass; that hits all arms alike, and less in longer rounds.

Where updates of the drafter are rarer than rounds, medians over rounds leave the cost of learning out: the overall
figures do not. What is learned on a thread of its own is waited for at the end of a round. In a stream it would go on
beside the next prompts; so the learning arms are charged more than it costs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pipeline.bench_arms import LEARNERS, OURS, Arm, Round, chunks
from pipeline.build_models import Models
from pipeline.config import Config
from pipeline.source import Source, stream
from store.errors import SourceError
from store.events import PromptReceived, PromptRejected

REHEARSALS = 2  # untimed rounds of arms that keep nothing from prompt to prompt: enough for allocations
REHEARSED = 48  # untimed prompts, at most, of arms of ours that do not learn: their n-grams and estimates must settle
FEWEST_ROUNDS, FEWEST_IN_ROUND = 10, 8


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        arms: which arms run.
        round_prompts: prompts of a round.
        rounds: timed rounds.
        warm_up: untimed prompts of the same stream before them, from which the learning arms learn.
    """

    arms: tuple[str, ...]
    round_prompts: int
    rounds: int
    warm_up: int

    @classmethod
    def of(
        cls, arms: Sequence[str], batch: int, prompts: int | None, round_prompts: int | None, warm_up: int
    ) -> "Plan":
        """The plan with its defaults: rounds of eight prompts at batch 1, else of twice the batch; 10 rounds or more.

        Args:
            arms: names.
            batch: most prompts at a time.
            prompts: timed prompts, made up to whole rounds.
            round_prompts: prompts of a round.
            warm_up: prompts.
        """
        size = round_prompts or max(FEWEST_IN_ROUND, 2 * batch)
        wanted = prompts or FEWEST_ROUNDS * size
        return cls(tuple(arms), size, -(-wanted // size), warm_up)

    @property
    def prompts(self) -> int:
        """Timed prompts."""
        return self.rounds * self.round_prompts


def choose_prompts(sources: Sequence[Source], config: Config, models: Models, number: int) -> list[PromptReceived]:
    """The stream's first prompts that every arm can complete.

    Raises:
        SourceError: there are fewer.
    """

    def fits(event: PromptReceived | PromptRejected) -> bool:
        if isinstance(event, PromptRejected):
            return False
        longest = max(len(words.encode(event.text)) for words in (models.target_words, models.drafter_words))
        return longest + 2 * config.sampling.max_new_tokens < min(models.target.max_length, models.drafter.max_length)

    chosen = [event for event in islice(filter(fits, stream(sources)), number) if isinstance(event, PromptReceived)]
    if len(chosen) < number:
        named = ", ".join(config.sources)
        hint = "Name more sources, or ask for fewer prompts or a shorter warm-up."
        raise SourceError(f"The benchmark needs {number} prompts, {named} has {len(chosen)} that fit. {hint}")
    return chosen


Progress = Callable[[str, int, int], None]


def measure(
    arms: Mapping[str, Arm],
    prompts: Sequence[PromptReceived],
    plan: Plan,
    progress: Progress,
    between: Callable[[int], None],
) -> dict[str, list[Round]]:
    """Warm the arms up on the first prompts, then run all of them on every round of the others, in rotating order.

    Args:
        arms: by name.
        prompts: `plan.warm_up` and then `plan.prompts` of them.
        plan: sizes.
        progress: called with what goes on, rounds done and rounds in all.
        between: called with its number before each timed round, while no arm runs.
    """
    rehearsed, timed = (chunks(part, plan.round_prompts) for part in (prompts[: plan.warm_up], prompts[plan.warm_up :]))
    few = {name: -(-REHEARSED // plan.round_prompts) if name in OURS else REHEARSALS for name in arms}
    before = {name: rehearsed if name in LEARNERS else rehearsed[-few[name] :] for name in arms}
    done, all_rounds = 0, sum(map(len, before.values())) + len(timed) * len(arms)
    for name, arm in arms.items():
        for chunk in before[name]:
            arm.complete(chunk)
            progress(f"warming up: {name}", done := done + 1, all_rounds)
    found: dict[str, list[Round]] = {name: [] for name in arms}
    for number, chunk in enumerate(timed):
        between(number)
        for name in _rotated(list(arms), number):
            found[name].append(arms[name].complete(chunk))
            progress(f"round {number + 1} of {len(timed)}: {name}", done := done + 1, all_rounds)
    return found


def _rotated(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]
