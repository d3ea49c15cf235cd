"""The recipe policy-values: its estimates equal the values of runs that always take the action."""

from pathlib import Path
from random import Random
from typing import Any

from synthetic_runs import block, write_run

from stages.drafting.sources import Exploration
from store.events import Action, Event
from store.query.log_reader import LogReader

BLOCKS = 4000
SECONDS = {Action.NOTHING: 1.0, Action.COPIES: 1.2, Action.MODEL: 1.5}


def tokens_of(action: Action, kind: int, random: Random) -> int:
    """Tokens that an action emits in a block of one of two kinds; each kind has another best action."""
    chances = {Action.NOTHING: (0.0, 0.0), Action.COPIES: (0.9, 0.1), Action.MODEL: (0.2, 0.7)}
    return 1 + (random.random() < chances[action][kind])


def make_blocks(share: float) -> list[Event]:
    """Blocks of a policy that uses copies in blocks of the first kind and the model in the others."""
    random, exploration = Random(3), Exploration(share, 3, tuple(Action))
    events: list[Event] = []
    for number in range(BLOCKS):
        kind = random.random() < 0.5
        choice = exploration.choose(0, number + 1, Action.MODEL if kind else Action.COPIES)
        events.append(
            block(
                block=number + 1,
                emitted=tokens_of(choice.action, kind, random),
                seconds_decode=0.0,
                seconds_translate=0.0,
                seconds_verify=SECONDS[choice.action],
                action=choice.action,
                propensity=choice.propensity,
            )
        )
    return events


def values_of(folder: Path, share: float) -> dict[str, dict[str, Any]]:
    with LogReader([write_run(folder, make_blocks(share))]) as log:
        return {row["action"]: row for row in log.recipe("policy-values").to_pylist()}


def test_an_estimate_is_the_value_of_always_taking_the_action(tmp_path: Path):
    found = values_of(tmp_path, 0.25)
    wanted = {"nothing": 1.0, "copies": 1.5, "model": 1.45, "as run": None}
    assert set(found) == set(wanted)
    for action, row in found.items():
        if (tokens := wanted[action]) is not None:
            seconds = SECONDS[Action(action)]
            assert abs(row["tokens_per_forward"] - tokens) <= 3 * row["forward_error"] + 1e-12
            assert abs(row["tokens_per_second"] - tokens / seconds) <= 3 * row["second_error"] + 1e-6
            assert row["forward_error"] < 0.06
    assert found["as run"]["tokens_per_forward"] > 1.6, "the policy takes the best action for each kind"
    assert found["as run"]["blocks"] == BLOCKS


def test_one_block_that_waited_for_a_core_does_not_dominate_a_rate(tmp_path: Path):
    counts = {"emitted": 1, "seconds_decode": 0.0, "seconds_translate": 0.0, "action": Action.NOTHING}
    seconds = [*[0.02] * 19, 0.9]
    events: list[Event] = [
        block(block=number + 1, seconds_verify=spent, propensity=0.5, **counts) for number, spent in enumerate(seconds)
    ]
    with LogReader([write_run(tmp_path, events)]) as log:
        row = {row["action"]: row for row in log.recipe("policy-values").to_pylist()}["nothing"]
    assert abs(row["tokens_per_second"] - 20 / (19 * 0.02 + 5 * 0.02)) < 1e-3, "it counts as five times the median"
