"""Progress of the speed benchmark: messages of the log."""

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter

from benchmarks.speed.arms import reference_of
from benchmarks.speed.results import ratio_of
from benchmarks.speed.work import MeasuredRound

LOG = logging.getLogger("omnidraft.bench")
Rounds = Mapping[str, Sequence[MeasuredRound]]


class Monitor:
    """Logs one message per step, and one per round when the last arm has finished it."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def start_step(self, phase: str, what: str, number: int = 1, total: int = 1) -> None:
        """Log the start of a step, as `warm-up 2/5: memory`."""
        self._began = perf_counter()
        LOG.info("%s: %s", f"{phase} {number}/{total}" if total > 1 else phase, what)

    def finish_turn(self, name: str, rounds: Rounds, planned: int) -> None:
        """Log the results of a round, if the arm was its last."""
        done = len(rounds[name])
        if any(len(one) < done for one in rounds.values()):
            return
        results = "; ".join(describe_turn(arm, rounds) for arm in rounds)
        left = (perf_counter() - self._began) / done * (planned - done)
        LOG.info("round %d/%d: %s%s", done, planned, results, f"; about {left:.0f} s left" if left else "")


def describe_turn(name: str, rounds: Rounds) -> str:
    """Format as `memory 45.1 tokens/s (2.25)`: speed of the arm's last round, and its median ratio to the reference so
    far, which has none itself."""
    last, reference = rounds[name][-1], reference_of(tuple(rounds))
    speed = f"{name} {last.emitted / last.seconds:.1f} tokens/s"
    return speed if name == reference else f"{speed} ({ratio_of(rounds[name], rounds[reference]).median:.2f})"
