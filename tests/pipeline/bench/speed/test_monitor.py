"""The progress that the benchmark shows: messages of the log in a pipe, one live line in a terminal."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from pipeline.bench.speed import monitor as bench_monitor
from pipeline.bench.speed.monitor import LiveMonitor, LogMonitor, describe_turn, open_monitor
from pipeline.run.rounds import Round


def make_round(tokens: int, seconds: float) -> Round:
    return Round((tuple(range(tokens)),), seconds)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The benchmark's log."""
    with caplog.at_level("INFO", logger="omnidraft.bench"):
        yield caplog


def test_a_turn_has_its_speed_and_the_median_ratio_so_far() -> None:
    rounds = {"plain": [make_round(10, 1.0), make_round(10, 2.0)], "memory": [make_round(10, 0.5), make_round(10, 0.5)]}
    assert describe_turn("plain", rounds) == "plain 5.0 tokens/s"
    assert describe_turn("memory", rounds) == "memory 20.0 tokens/s (3.00)"  # of 2 and 4


def test_a_round_that_the_reference_has_not_run_yet_has_no_ratio() -> None:
    assert describe_turn("memory", {"plain": [], "memory": [make_round(10, 0.5)]}) == "memory 20.0 tokens/s"
    one, two = make_round(10, 1.0), make_round(10, 0.25)
    assert describe_turn("memory", {"plain": [one], "memory": [one, two]}) == "memory 40.0 tokens/s (1.00)"


def test_a_pipe_gets_a_message_per_step_and_per_round(log: pytest.LogCaptureFixture) -> None:
    now = 0.0
    monitor = LogMonitor(lambda: now)
    monitor.start_step("loading the models", "target, drafter")
    monitor.start_step("warm-up", "memory", 2, 4)
    monitor.start_step("measuring", "4 rounds of 3 prompts in 2 arms")
    rounds: dict[str, list[Round]] = {"plain": [], "memory": []}
    now = 30.0
    rounds["memory"].append(make_round(10, 0.5))
    monitor.finish_turn("memory", rounds, 4)
    rounds["plain"].append(make_round(10, 1.0))
    monitor.finish_turn("plain", rounds, 4)
    monitor.finish_turn("plain", rounds, 1)
    assert log.messages == [
        "loading the models: target, drafter",
        "warm-up 2/4: memory",
        "measuring: 4 rounds of 3 prompts in 2 arms",
        "round 1/4: plain 10.0 tokens/s; memory 20.0 tokens/s (2.00); about 90 s left",
        "round 1/1: plain 10.0 tokens/s; memory 20.0 tokens/s (2.00)",
    ]


def test_a_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(bench_monitor, "stderr_console", lambda: console)
    with open_monitor() as monitor:
        assert isinstance(monitor, LiveMonitor)
        monitor.start_step("warm-up", "memory", 2, 4)
    assert log.messages == []


def test_a_pipe_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_monitor, "stderr_console", lambda: Console(file=io.StringIO()))
    with open_monitor() as monitor:
        assert isinstance(monitor, LogMonitor)


def test_the_live_line_has_the_last_result_and_the_share_that_is_done() -> None:
    progress = Progress(TextColumn("{task.description}"), console=Console(file=io.StringIO()), disable=True)
    monitor = LiveMonitor(progress)
    (task,) = progress.tasks
    monitor.start_step("loading the arms", "memory", 2, 4)
    assert (task.description, task.completed, task.total) == ("loading the arms 2/4: memory", 1, 4)
    monitor.start_step("computing the results", "4 of 4 rounds")
    assert (task.description, task.completed) == ("computing the results: 4 of 4 rounds", 0)
    monitor.finish_turn("memory", {"plain": [make_round(10, 1.0)], "memory": [make_round(10, 0.5)]}, 4)
    assert task.description == "round 1/4: memory 20.0 tokens/s (2.00)"
    assert (task.completed, task.total) == (2, 8)
