"""Size of a measurement of the speed benchmark, and its defaults."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlanDefaults:
    """Sizes of a measurement where the options do not set them."""

    rounds: int  # number of timed rounds
    round_prompts: int  # prompts per round, at least `per_row` times the batch size
    per_row: int  # see `round_prompts`
    warm_up: int  # untimed prompts
    max_new_tokens: int  # most target tokens in one completion


FULL = PlanDefaults(rounds=10, round_prompts=8, per_row=2, warm_up=42, max_new_tokens=64)
QUICK = PlanDefaults(rounds=4, round_prompts=3, per_row=1, warm_up=3, max_new_tokens=32)


@dataclass(frozen=True)
class SpeedPlan:
    """Size of a measurement."""

    arms: tuple[str, ...]  # names of the arms to run
    round_prompts: int  # prompts per round
    rounds: int  # number of timed rounds
    warm_up: int  # untimed prompts of the same stream before the timed ones, from which the learning arms learn

    @classmethod
    def from_options(
        cls,
        arms: Sequence[str],
        batch: int,
        prompts: int | None = None,
        round_prompts: int | None = None,
        warm_up: int | None = None,
        *,
        defaults: PlanDefaults = FULL,
    ) -> "SpeedPlan":
        """The plan of a batch size."""
        size = round_prompts or max(defaults.round_prompts, defaults.per_row * batch)
        wanted = prompts or defaults.rounds * size
        return cls(tuple(arms), size, -(-wanted // size), defaults.warm_up if warm_up is None else warm_up)

    @property
    def prompts(self) -> int:
        """Number of timed prompts."""
        return self.rounds * self.round_prompts
