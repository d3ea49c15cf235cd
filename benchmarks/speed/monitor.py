"""Progress of the speed benchmark on standard error: one live line in a terminal, messages of the log elsewhere."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from benchmarks.speed.arms import reference_of
from benchmarks.speed.results import ratio_of
from benchmarks.speed.work import MeasuredRound
from pipeline.reports.terminal import stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress

LOG = logging.getLogger("omnidraft.bench")
Rounds = Mapping[str, Sequence[MeasuredRound]]


class Monitor(Protocol):
    """Receives what the benchmark does, as it does it."""

    def start_step(self, phase: str, what: str, number: int = 1, total: int = 1) -> None:
        """Receive the start of a step.

        Args:
            phase: phase of the benchmark, such as `warm-up`.
            what: what the step does, such as the name of an arm.
            number: number of the step in its phase, from 1.
            total: number of steps of the phase.
        """
        ...

    def finish_turn(self, name: str, rounds: Rounds, planned: int) -> None:
        """Receive the result of one arm in one round.

        Args:
            name: name of the arm.
            rounds: finished rounds by arm. In the current round some arms may not have run yet.
            planned: number of rounds to measure.
        """
        ...


class LogMonitor(Monitor):
    """Logs one message per step, and one per round when the last arm has finished it.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._began = clock, clock()

    @override
    def start_step(self, phase: str, what: str, number: int = 1, total: int = 1) -> None:
        self._began = self._clock()
        LOG.info("%s", describe_step(phase, what, number, total))

    @override
    def finish_turn(self, name: str, rounds: Rounds, planned: int) -> None:
        done = len(rounds[name])
        if any(len(one) < done for one in rounds.values()):
            return
        results = "; ".join(describe_turn(arm, rounds) for arm in rounds)
        left = (self._clock() - self._began) / done * (planned - done)
        LOG.info("round %d/%d: %s%s", done, planned, results, f"; about {left:.0f} s left" if left else "")


class LiveMonitor(Monitor):
    """Shows the current step, or the last result of the current round, in one line with a bar.

    Args:
        progress: a started progress display with one task.
    """

    def __init__(self, progress: "Progress") -> None:
        self._progress, self._task = progress, progress.add_task("", total=None)

    @override
    def start_step(self, phase: str, what: str, number: int = 1, total: int = 1) -> None:
        line = describe_step(phase, what, number, total)
        self._progress.update(self._task, description=line, completed=number - 1, total=total)

    @override
    def finish_turn(self, name: str, rounds: Rounds, planned: int) -> None:
        self._progress.update(
            self._task,
            description=f"round {len(rounds[name])}/{planned}: {describe_turn(name, rounds)}",
            completed=sum(map(len, rounds.values())),
            total=planned * len(rounds),
        )


@contextmanager
def open_monitor() -> Iterator[Monitor]:
    """Show progress while the block runs: live in a terminal, else in the log."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = stderr_console()
    if not console.is_terminal:
        yield LogMonitor()
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        yield LiveMonitor(progress)


def describe_step(phase: str, what: str, number: int, total: int) -> str:
    """Format as `warm-up 2/5: memory`; the numbers are left out if the phase is one step."""
    return f"{phase} {number}/{total}: {what}" if total > 1 else f"{phase}: {what}"


def describe_turn(name: str, rounds: Rounds) -> str:
    """Format as `memory 45.1 tokens/s (2.25)`: speed of the arm's last round, and its median ratio to the reference so
    far. The reference has no ratio, nor has an arm whose rounds the reference has not run yet."""
    last, reference = rounds[name][-1], reference_of(tuple(rounds))
    speed = f"{name} {last.emitted / last.seconds:.1f} tokens/s"
    common = min(len(rounds[name]), len(rounds[reference]))
    if name == reference or not common:
        return speed
    ratio = ratio_of(rounds[name][:common], rounds[reference][:common])
    return f"{speed} ({ratio.median:.2f})"
