"""Candidates of trees have their own columns in the recipes, and the drafter's rates exclude them."""

from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import block, bonus, decision, make_rejection, prompt, write_run
from tree_making import NODES, make_tree

from store.events import DraftSource, Event
from store.query.log_reader import LogReader
from store.query.summary import summarize

TEXT = {"drafter": DraftSource.LOOKUP, "drafted": 1, "proposed": 1, "candidates": 1}
MEMORY = {"drafter": DraftSource.MEMORY, "drafted": 4, "proposed": 4, "candidates": 4}


def mixed_run() -> list[Event]:
    """One prompt of four blocks: the model gets one of two tokens accepted, the memory 2 + 0 and the text 1."""
    own_text = make_tree(NODES[3:], [0.1], begin=5, block=2, drafter=DraftSource.LOOKUP, chance=1.0)
    return [
        decision(),
        make_rejection(index=1, position=1),
        *make_tree(NODES, [0.4, 0.6], begin=2, block=1),
        *own_text,
        *make_tree(NODES, [0.75], begin=7, block=3),
        bonus(block=4, position=8),
        block(drafted=2, proposed=2, judged=2, accepted=1, emitted=2),
        block(block=1, judged=2, accepted=2, emitted=3, expected_tokens=2.5, expected_seconds=0.25, **MEMORY),
        block(block=2, judged=1, accepted=1, emitted=2, **TEXT),
        block(block=3, judged=1, accepted=0, emitted=1, **MEMORY),
        block(block=4, drafted=0, proposed=0, judged=0, accepted=0, emitted=1),
        prompt(
            emitted=9, blocks=5, drafted=2, judged=2, accepted=1, lookup_blocks=3,
            lookup_drafted=9, lookup_judged=4, lookup_accepted=3,
        ),
    ]  # fmt: skip


def recipe(folder: Path, name: str) -> list[dict[str, Any]]:
    with LogReader([write_run(folder, mixed_run())]) as log:
        return log.recipe(name).to_pylist()


def test_accepted_tokens_by_source(tmp_path: Path):
    memory, text, model = recipe(tmp_path, "accepted-by-source")
    assert (memory["source"], text["source"], model["source"]) == ("memory", "lookup", "model")
    counts = ("candidates", "judged", "alternatives", "accepted")
    assert [memory[name] for name in counts] == [8, 3, 3, 2]
    assert [text[name] for name in counts] == [1, 1, 0, 1]
    assert [model[name] for name in counts] == [2, 2, 0, 1]
    assert [row["acceptance_rate"] for row in (memory, text, model)] == [pytest.approx(2 / 3), 1.0, 0.5]
    assert [row["share_of_emitted"] for row in (memory, text, model)] == [pytest.approx(n / 9) for n in (2, 1, 1)]
    assert [row["accepted_per_forward"] for row in (memory, text, model)] == [0.4, 0.2, 0.2]


def test_every_recipe_and_the_summary_count_the_same_judged_tokens(tmp_path: Path):
    """By source, by index and by dataset: one number of candidates, judged and accepted tokens."""
    names = ("candidates", "judged", "accepted")
    by_source = {row["source"]: [row[name] for name in names] for row in recipe(tmp_path / "a", "accepted-by-source")}
    by_index: dict[str, list[int]] = {}
    for row in recipe(tmp_path / "b", "by-position"):
        sums = by_index.setdefault(row["drafter"], [0, 0, 0])
        by_index[row["drafter"]] = [one + row[name] for one, name in zip(sums, names, strict=True)]
    assert by_index == by_source
    (dataset,) = recipe(tmp_path / "c", "acceptance-by-dataset")
    assert (dataset["judged"], dataset["acceptance_rate"]) == (by_source["model"][1], 0.5)


def test_the_longest_runs_print_the_bonus_token_after_them(tmp_path: Path):
    """It was said, too, but is not counted as accepted."""
    events = [
        decision(),
        bonus(position=1),
        block(drafted=1, proposed=1, judged=1, accepted=1, emitted=2),
        prompt(emitted=2, blocks=1, drafted=1, judged=1, accepted=1),
    ]
    with LogReader([write_run(tmp_path, events)]) as log:
        (row,) = log.recipe("longest-runs").to_pylist()
    assert (row["accepted_tokens"], len(row["token_ids"])) == (1, 2)


def test_the_chances_are_compared_with_what_was_accepted(tmp_path: Path):
    text, memory = recipe(tmp_path, "memory-calibration")
    assert (text["source"], text["chance_from"], text["mean_chance"]) == ("lookup", 0.9, 1.0)
    assert (memory["source"], memory["chance_from"], memory["chance_to"]) == ("memory", 0.5, 0.6)
    assert (memory["judged"], memory["accepted"]) == (6, 2), "alternatives are judged, unjudged candidates are not"
    assert memory["accepted_fraction"] == pytest.approx(1 / 3)
    assert memory["overestimate"] == pytest.approx(0.5 - 1 / 3)


@pytest.mark.parametrize(
    "name", ["acceptance-by-dataset", "acceptance-over-time", "acceptance-by-version", "by-ngram-length"]
)
def test_rates_of_the_drafter_exclude_trees(tmp_path: Path, name: str):
    (row,) = recipe(tmp_path, name)
    assert row["acceptance_rate"] == 0.5


def test_an_alternative_is_not_judged_at_its_index(tmp_path: Path):
    rows = {(row["drafter"], row["index"]): row for row in recipe(tmp_path, "by-position")}
    memory = [rows["memory", index] for index in range(4)]
    assert [row["acceptance_rate"] for row in memory] == [0.5, None, 1.0, None]
    assert [row["alternatives"] > 0 for row in memory] == [False, True, False, True]
    assert rows["model", 1]["acceptance_rate"] == 0.0


def test_the_summary_counts_copied_drafts_together(tmp_path: Path):
    totals = summarize(write_run(tmp_path, mixed_run()))["totals"]
    assert (totals["acceptance_rate"], totals["mean_accepted_length"]) == (0.5, 0.5)
    assert (totals["lookup_share"], totals["lookup_acceptance_rate"]) == (0.6, 0.75)
