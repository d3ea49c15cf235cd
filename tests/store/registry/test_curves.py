"""Curves: which numbers an event contributes."""

import pytest
from event_making import make_completed, make_drifted, make_published, make_updated

from store.events import PromptCompleted, Updated
from store.query.rates import Acceptance
from store.registry.log_points import WINDOW, Curves, describe_step
from store.registry.registered_version import metric_key
from store.registry.run_description import numbers_of

ACCEPTANCE = {f"window/acceptance_{name}" for name in ("rate", "low", "high", "judged")}
RATES = ACCEPTANCE | {
    "window/mean_accepted_length",
    "window/block_efficiency",
    "window/accepted_by_model",
    "window/drafted_pieces",
    "window/tokens_per_second",
}


@pytest.fixture
def curves() -> Curves:
    return Curves()


def add(curves: Curves, prompt: PromptCompleted) -> dict[str, float]:
    """The numbers after a prompt."""
    curves.add_prompt(prompt)
    return curves.measure_prompts(prompt.target)


def update(part: str, after: float | None = 0.6) -> Updated:
    before = None if after is None else 0.5
    return make_updated(offset=9, part=part, acceptance_before=before, acceptance_after=after, served=False)


def test_a_prompt_gives_the_rates(curves: Curves):
    low, high = Acceptance(10, 20).interval or (0.0, 1.0)
    assert add(curves, make_completed(3, judged=20, accepted=10)) == {  # ten blocks, twenty tokens, one second
        "window/acceptance_rate": 0.5,
        "window/acceptance_low": low,
        "window/acceptance_high": high,
        "window/acceptance_judged": 20.0,
        "window/mean_accepted_length": 1.0,
        "window/block_efficiency": 2.0,
        "window/accepted_by_model": 1.0,
        "window/drafted_pieces": 2.5,
        "window/tokens_per_second": 20.0,
    }


def test_requests_that_were_cancelled_before_their_first_block_have_no_rates(curves: Curves):
    cancelled = make_completed(3, judged=0, accepted=0, blocks=0, emitted=0, finish="cancelled")
    assert add(curves, cancelled) == {"window/tokens_per_second": 0.0}


def test_a_rate_looks_back_on_a_window_and_no_further(curves: Curves):
    add(curves, make_completed(0, judged=1000, accepted=1000))
    rates = [add(curves, make_completed(offset, judged=20, accepted=5)) for offset in range(1, WINDOW + 1)]
    assert rates[-1]["window/acceptance_rate"] == 0.25
    assert rates[-2]["window/acceptance_rate"] > 0.8


def test_tokens_per_second_counts_overlapping_prompts_once(curves: Curves):
    rates = [add(curves, make_completed(offset, started=10.0, finished=12.0)) for offset in range(4)]
    assert rates[-1]["window/tokens_per_second"] == 4 * 20 / 2.0


def test_nothing_judged_gives_no_acceptance_rate(curves: Curves):
    assert set(add(curves, make_completed(0, judged=0, accepted=0))) == RATES - ACCEPTANCE


def test_updates_of_the_drafter_and_drifts_have_numbers():
    assert describe_step(update("drafter")) == {
        "window/loss": 1.25,
        "window/served": 0.0,
        "window/expected_acceptance": 0.6,
    }
    assert set(describe_step(update("drafter", after=None))) == {"window/loss", "window/served"}
    assert describe_step(update("head")) == {}
    assert describe_step(make_drifted(offset=4)) == {"window/drift_rate_before": 0.8, "window/drift_rate_after": 0.25}


def test_versions_have_a_curve_of_the_probe(curves: Curves):
    counts = {"tokens": (4, 6, 2, 4, 4), "greedy": (1, 4, 1, 2, 2), "forwards": (2, 2, 2, 2, 2)}
    measured = {f"probe_{name}": values for name, values in counts.items()} | {
        "probe_sampled": (1.0, 2.0, 1.0, 2.0, 2.0)
    }
    rates = {"versions/acceptance": 0.5, "versions/tokens_per_pass": 2.0}
    assert curves.describe_version(make_published(reason="baseline", **measured)) == rates
    found = curves.describe_version(make_published(version=2, cache_entries=60, reason="end", **measured))
    assert found == rates | {"version": 2}


def test_each_of_several_targets_has_rates_of_its_own_in_addition_to_the_overall_ones():
    curves = Curves(("builtin:big", "/models/small one"))
    found = [
        add(curves, make_completed(0, target="builtin:big", judged=20, accepted=10)),
        add(curves, make_completed(1, target="/models/small one", judged=20, accepted=20)),
        add(curves, make_completed(2, target="builtin:big", judged=20, accepted=0)),
    ]
    assert [{key: value for key, value in one.items() if "rate" in key} for one in found] == [
        {"window/acceptance_rate": 0.5, "window/acceptance_rate.builtin_big": 0.5},
        {"window/acceptance_rate": 0.75, "window/acceptance_rate._models_small_one": 1.0},
        {"window/acceptance_rate": 0.5, "window/acceptance_rate.builtin_big": 0.25},
    ]
    assert found[1]["window/block_efficiency._models_small_one"] == 3.0
    assert set(add(Curves(("big",)), make_completed(0))) == RATES, "one target has only the overall curve"


def test_mlflow_takes_the_names_of_the_curves_of_any_target():
    from mlflow.utils.validation import _validate_metric_name

    targets = ("../models/a", "hf.co/org/name:8b", "C:\\models\\b", "größe")
    curves = Curves(targets)
    for offset, target in enumerate(targets):
        for key in add(curves, make_completed(offset, target=target)):
            _validate_metric_name(metric_key(key))


def test_lookups_have_a_curve_and_leave_those_of_the_model_alone(curves: Curves):
    copied = {"lookup_blocks": 5, "lookup_judged": 50, "lookup_accepted": 50, "own_accepted": 20}
    first = add(curves, make_completed(0, blocks=20, **copied, emitted=75))
    only_copies = make_completed(1, blocks=10, lookup_blocks=10, judged=0, accepted=0, drafted=0, emitted=15)
    second = add(curves, only_copies)
    assert (first["window/acceptance_rate"], first["window/mean_accepted_length"]) == (0.5, 10 / 15)
    assert (first["window/lookup_share"], second["window/lookup_share"]) == (0.25, 0.5)
    assert (first["window/accepted_from_own_text"], first["window/accepted_from_memory"]) == (1.0, 1.5)
    assert second["window/block_efficiency"] == 3.0
    sources = {f"window/accepted_{source}" for source in ("by_model", "from_own_text", "from_memory")}
    others = {"window/lookup_share", "window/block_efficiency", "window/tokens_per_second"}
    assert set(add(Curves(), only_copies)) == sources | others


def test_the_results_of_a_run_have_no_prefix():
    drifts = [{"action": "reset"}, {"action": "ignored"}]
    assert numbers_of({"totals": {"tokens_per_second": 2, "drifts": drifts}}) == {
        "tokens_per_second": 2.0,
        "drifts": 1.0,
    }
    totals = {"prompts": 72, "acceptance_rate": None, "seconds": {"decode": 1.0}, "ledger": {"net_seconds": -0.5}}
    assert numbers_of({"totals": totals, "datasets": {"code": {}}}) == {
        "whole/prompts": 72.0,
        "whole/net_seconds": -0.5,
    }
