"""Drafts of lookups are counted separately: the metrics of acceptance are those of the model."""

import pytest
from synthetic_runs import block, decision, make_rejection, prompt, write_run

from store.events import DraftSource, Event
from store.query.log_reader import LogReader
from store.query.summary import summarize


def mixed_run() -> list[Event]:
    """One prompt of two blocks: the model gets one of two tokens accepted; a lookup gets two of three."""
    copied = {
        "drafter": DraftSource.LOOKUP,
        "block": 1,
        "drafter_levels": (1.0,),
        "head_estimate": None,
        "entropy": 0.0,
    }
    return [
        decision(),
        make_rejection(index=1, position=1),
        decision(**copied, index=0, position=2, target_levels=(0.5,)),
        decision(**copied, index=1, position=3, target_levels=(1.0,)),
        make_rejection(**copied, index=2, position=4, target_levels=(0.125,)),
        block(drafted=2, proposed=2, judged=2, accepted=1, emitted=2),
        block(block=1, drafted=3, proposed=3, judged=3, accepted=2, emitted=3, drafter=DraftSource.LOOKUP),
        prompt(
            emitted=5, blocks=2, drafted=2, judged=2, accepted=1, first_judged=1, first_accepted=1, lookup_blocks=1,
            lookup_drafted=3, lookup_judged=3, lookup_accepted=2,
        ),
    ]  # fmt: skip


def recipe(folder, name: str) -> list[dict]:
    with LogReader([write_run(folder, mixed_run())]) as log:
        return log.recipe(name).to_pylist()


def test_a_summary_has_separate_acceptance_rates_of_the_model_and_of_lookups(tmp_path):
    totals = summarize(write_run(tmp_path, mixed_run()))["totals"]
    assert (totals["acceptance_rate"], totals["mean_accepted_length"]) == (0.5, 1.0)
    assert (totals["lookup_share"], totals["lookup_acceptance_rate"]) == (0.5, 0.6667)
    assert totals["block_efficiency"] == 2.5, "this counts all blocks"


@pytest.mark.parametrize(
    "name", ["acceptance-by-dataset", "acceptance-over-time", "acceptance-by-version", "by-ngram-length"]
)
def test_acceptance_rates_exclude_lookups(tmp_path, name: str):
    (row,) = recipe(tmp_path, name)
    assert row["acceptance_rate"] == 0.5
    assert row.get("mean_accepted_length", 1.0) == 1.0


def test_decisions_about_copies_are_derived_again_and_need_probability_one(tmp_path):
    with LogReader([write_run(tmp_path / "sound", mixed_run())]) as log:
        assert (log.check().judged, log.check().mismatches.num_rows) == (5, 0)
    doubtful = decision(drafter=DraftSource.LOOKUP, drafter_levels=(1.0, 0.5), target_levels=(1.0, 0.5))
    with LogReader([write_run(tmp_path / "doubtful", [doubtful])]) as log:
        (row,) = log.check().mismatches.to_pylist()
    assert "probability 1" in row["problem"]
