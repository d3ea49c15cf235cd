"""The times at which a run commits."""

from itertools import pairwise

import pytest

from pipeline.run.committer import CREDIT, Committer
from store.log.run_log import Commit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """Takes commits; `commit_seconds` is what the writer thread needed for the last."""

    def __init__(self) -> None:
        self.commit_seconds, self.committing = 0.0, False
        self.all_commit_seconds = 0.0
        self.taken: list[Commit] = []

    def commit(self, commit: Commit, *, wait: bool = False) -> None:
        self.taken.append(commit)
        self.all_commit_seconds += self.commit_seconds


class World:
    def __init__(self, seconds: float) -> None:
        self.clock, self.log = Clock(), Log()
        self.learning = False
        self.saving = 0.0  # seconds that a snapshot takes
        self.committer = Committer(
            seconds,
            self.save,
            lambda: self.learning,
            self.log,  # type: ignore[arg-type]
            clock=self.clock,
        )

    def save(self) -> None:
        self.clock.now += self.saving

    def commits_at(self, times: list[float]) -> list[float]:
        """Those of the times at which a commit was due, and made."""
        made = []
        for time in times:
            self.clock.now = max(time, self.clock.now)
            if self.committer.is_due():
                made.append(time)
                self.committer.commit()
        return made


def test_the_first_commit_comes_at_once_and_the_others_after_so_many_seconds():
    assert World(10.0).commits_at([0, 1, 9, 10, 19, 20, 29]) == [0, 10, 20]


@pytest.mark.constants(commit_share=0.02)
def test_a_dear_commit_waits_until_it_is_a_small_share_of_the_time():
    world = World(10.0)
    world.saving, world.log.commit_seconds = 0.5, 0.5
    assert world.commits_at([0, 10, 49, 51, 99, 102]) == [0, 51, 102]


@pytest.mark.constants(commit_share=0.02)
def test_the_first_commits_come_early_and_all_take_a_small_share_of_the_time():
    world = World(0.9)
    world.saving, world.log.commit_seconds = 0.025, 0.025
    assert world.commits_at([float(second) for second in range(11)]) == list(range(11))
    made = world.commits_at([float(second) for second in range(11, 1001)])
    assert 0.95 < (len(made) + 11) * 0.05 / (CREDIT + 0.02 * 1000) <= 1.0


def test_a_run_of_the_default_size_loses_two_seconds_at_most():
    world = World(1.0)
    world.saving, world.log.commit_seconds = 0.05, 0.07
    made = world.commits_at([second / 10 for second in range(3000)])
    assert max(later - before for before, later in pairwise(made)) <= 2.1


def test_an_update_under_way_is_waited_for_but_not_for_ever():
    world = World(10.0)
    world.commits_at([0])
    world.learning = True
    assert world.commits_at([10, 19]) == []
    assert world.commits_at([20]) == [20]
    world.learning = False
    assert world.commits_at([29, 30]) == [30]


def test_what_it_cost_is_counted():
    world = World(10.0)
    world.saving, world.log.commit_seconds = 0.25, 2.0
    world.commits_at([0, 11, 22])
    costs = world.committer.costs
    assert (costs.commits, costs.seconds) == (3, pytest.approx(0.75))
    assert costs.seconds_beside == 6.0
