"""Curves: which points an event contributes, at which step, and that none is lost or sent alone."""

from collections.abc import Sequence

import pytest
from event_making import make_completed, make_drifted, make_published, make_updated

from pipeline.run.mlflow_run import FLUSH, WINDOW, Curves, numbers_of
from store.events import BlockDone, Updated
from store.query.acceptance import Acceptance
from store.registry.registered_version import run_note
from store.registry.registry import NoRegistry, Point

ACCEPTANCE = {f"curve/acceptance_{name}" for name in ("rate", "low", "high", "judged")}
RATES = ACCEPTANCE | {
    "curve/mean_accepted_length",
    "curve/block_efficiency",
    "curve/accepted_by_model",
    "curve/drafted_pieces",
    "curve/tokens_per_second",
}


class Received(NoRegistry):
    def __init__(self) -> None:
        self.batches: list[list[Point]] = []

    def log_points(self, points: Sequence[Point]) -> None:
        self.batches.append(list(points))

    @property
    def points(self) -> list[Point]:
        return [point for batch in self.batches for point in batch]

    def values(self, step: int) -> dict[str, float]:
        return {key: value for key, value, at, _ in self.points if at == step}


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
def curves(received: Received) -> Curves:
    return Curves(received, lambda: 1_700_000_000_000)


def update(part: str, after: float | None = 0.6) -> Updated:
    before = None if after is None else 0.5
    return make_updated(offset=9, part=part, acceptance_before=before, acceptance_after=after, served=False)


def test_a_prompt_gives_the_rates_at_its_offset(curves: Curves, received: Received):
    curves.add(make_completed(3, judged=20, accepted=10))  # ten blocks, twenty tokens, one second
    curves.flush()
    low, high = Acceptance(10, 20).interval or (0.0, 1.0)
    assert received.values(3) == {
        "curve/acceptance_rate": 0.5,
        "curve/acceptance_low": low,
        "curve/acceptance_high": high,
        "curve/acceptance_judged": 20.0,
        "curve/mean_accepted_length": 1.0,
        "curve/block_efficiency": 2.0,
        "curve/accepted_by_model": 1.0,
        "curve/drafted_pieces": 2.5,
        "curve/tokens_per_second": 20.0,
    }
    assert {point[3] for point in received.points} == {1_700_000_000_000}


def test_requests_that_were_cancelled_before_their_first_block_have_no_rates(curves: Curves, received: Received):
    curves.add(make_completed(3, judged=0, accepted=0, blocks=0, emitted=0, finish="cancelled"))
    curves.flush()
    assert received.values(3) == {"curve/tokens_per_second": 0.0}


def test_a_rate_looks_back_on_a_window_and_no_further(curves: Curves, received: Received):
    curves.add(make_completed(0, judged=1000, accepted=1000))
    for offset in range(1, WINDOW + 1):
        curves.add(make_completed(offset, judged=20, accepted=5))
    curves.flush()
    assert received.values(WINDOW)["curve/acceptance_rate"] == 0.25
    assert received.values(WINDOW - 1)["curve/acceptance_rate"] > 0.8


def test_tokens_per_second_counts_overlapping_prompts_once(curves: Curves, received: Received):
    for offset in range(4):
        curves.add(make_completed(offset, started=10.0, finished=12.0))
    curves.flush()
    assert received.values(3)["curve/tokens_per_second"] == 4 * 20 / 2.0


def test_nothing_judged_gives_no_acceptance_rate(curves: Curves, received: Received):
    curves.add(make_completed(0, judged=0, accepted=0))
    curves.flush()
    assert set(received.values(0)) == RATES - ACCEPTANCE


def test_an_update_of_the_drafter_gives_its_loss_and_its_fate(curves: Curves, received: Received):
    curves.add(update("drafter"))
    curves.flush()
    assert received.values(9) == {"learn/loss": 1.25, "learn/served": 0.0, "learn/expected_acceptance": 0.6}


def test_an_update_that_no_gate_saw_has_no_expectation(curves: Curves, received: Received):
    curves.add(update("drafter", after=None))
    curves.flush()
    assert set(received.values(9)) == {"learn/loss", "learn/served"}


def test_drifts_and_versions_are_points(curves: Curves, received: Received):
    curves.add(make_drifted(offset=4))
    curves.add(make_published(offset=3, reason="floor"))
    curves.add(make_published(offset=5, version=2, cache_entries=60, reason="interval"))
    curves.flush()
    assert received.values(3) == {}, "MLflow's pages begin with the metric that came first"
    assert received.values(4) == {"drift/rate_before": 0.8, "drift/rate_after": 0.25}
    assert received.values(5) == {"version/number": 2, "version/cache_entries": 60}


def test_versions_have_a_curve_of_the_probe(curves: Curves, received: Received):
    counts = {"tokens": (4, 6, 2, 4, 4), "greedy": (1, 4, 1, 2, 2), "forwards": (2, 2, 2, 2, 2)}
    measured = {f"probe_{name}": values for name, values in counts.items()} | {
        "probe_sampled": (1.0, 2.0, 1.0, 2.0, 2.0)
    }
    rates = {"probe/acceptance": 0.5, "probe/acceptance_sampled": 0.4, "probe/tokens_per_forward": 2.0}
    curves.add(make_published(reason="floor", **measured))
    curves.add(make_completed(7))
    curves.add(make_published(offset=7, version=1, reason="end", **measured))
    curves.flush()
    assert received.values(0) == rates
    assert received.points[0][0].startswith("probe/"), "MLflow compares runs by the metric that came first"
    assert rates.items() <= received.values(7).items()


def test_other_events_give_nothing(curves: Curves, received: Received):
    curves.add(update("head"))
    curves.add(BlockDone(0, "docs", 0, 1, 5, 3, 2, 1, 2, 0.1, 0.1, 0.1))
    curves.flush()
    assert received.batches == []


def test_points_are_sent_together_and_none_is_lost(curves: Curves, received: Received):
    for offset in range(40):
        curves.add(make_completed(offset))
    curves.flush()
    curves.flush()
    assert len(received.points) == 40 * len(RATES)
    assert sorted({point[2] for point in received.points}) == list(range(40))
    assert all(len(batch) >= FLUSH for batch in received.batches[:-1])


def test_each_of_several_targets_has_rates_of_its_own_in_addition_to_the_overall_ones(received: Received):
    curves = Curves(received, lambda: 0, ("builtin:big", "/models/small one"))
    curves.add(make_completed(0, target="builtin:big", judged=20, accepted=10))
    curves.add(make_completed(1, target="/models/small one", judged=20, accepted=20))
    curves.add(make_completed(2, target="builtin:big", judged=20, accepted=0))
    curves.flush()
    rates = [{key: value for key, value in received.values(step).items() if "rate" in key} for step in range(3)]
    assert rates == [
        {"curve/acceptance_rate": 0.5, "curve/acceptance_rate.builtin_big": 0.5},
        {"curve/acceptance_rate": 0.75, "curve/acceptance_rate._models_small_one": 1.0},
        {"curve/acceptance_rate": 0.5, "curve/acceptance_rate.builtin_big": 0.25},
    ]
    assert received.values(1)["curve/block_efficiency._models_small_one"] == 3.0


def test_mlflow_takes_the_names_of_the_curves_of_any_target(received: Received):
    from mlflow.utils.validation import _validate_metric_name

    targets = ("../models/a", "hf.co/org/name:8b", "C:\\models\\b", "größe")
    curves = Curves(received, lambda: 0, targets)
    for offset, target in enumerate(targets):
        curves.add(make_completed(offset, target=target))
    curves.flush()
    for key in {point[0] for point in received.points}:
        _validate_metric_name(key)


def test_one_target_has_only_the_overall_curve(received: Received):
    curves = Curves(received, lambda: 0, ("big",))
    curves.add(make_completed(0))
    curves.flush()
    assert set(received.values(0)) == RATES


def test_lookups_have_a_curve_and_leave_those_of_the_model_alone(curves: Curves, received: Received):
    copied = {"lookup_blocks": 5, "lookup_judged": 50, "lookup_accepted": 50, "own_accepted": 20}
    curves.add(make_completed(0, blocks=20, **copied, emitted=75))
    curves.add(make_completed(1, blocks=10, lookup_blocks=10, judged=0, accepted=0, drafted=0, emitted=15))
    curves.flush()
    first, second = received.values(0), received.values(1)
    assert (first["curve/acceptance_rate"], first["curve/mean_accepted_length"]) == (0.5, 10 / 15)
    assert (first["curve/lookup_share"], second["curve/lookup_share"]) == (0.25, 0.5)
    assert (first["curve/accepted_from_own_text"], first["curve/accepted_from_memory"]) == (1.0, 1.5)
    assert second["curve/block_efficiency"] == 3.0
    alone = Curves(received, lambda: 0)
    alone.add(make_completed(2, blocks=10, lookup_blocks=10, judged=0, accepted=0, drafted=0))
    alone.flush()
    sources = {f"curve/accepted_{source}" for source in ("by_model", "from_own_text", "from_memory")}
    others = {"curve/lookup_share", "curve/block_efficiency", "curve/tokens_per_second"}
    assert set(received.values(2)) == sources | others


def test_the_description_of_a_run_has_the_fifths_of_its_datasets_also_where_nothing_was_judged():
    def part(rate: float | None, efficiency: float | None) -> dict[str, float | None]:
        return {"acceptance_rate": rate, "block_efficiency": efficiency}

    datasets = {
        "questions": {"first_fifth": part(0.6531, 1.8), "last_fifth": part(0.25, 1.704)},
        "code": {"first_fifth": part(0.39, 1.44), "last_fifth": part(None, 1.94)},
    }
    numbers = numbers_of({"totals": {"prompts": 72, "ledger": {"net_seconds": -0.5}}, "datasets": datasets})
    assert numbers["questions/first_fifth_block_efficiency"] == 1.8
    assert "code/last_fifth_acceptance_rate" not in numbers
    lines = run_note("monday", [("questions", "builtin:questions")], numbers).splitlines()
    assert lines[2:6] == [
        "| first to last fifth | tokens per target forward | acceptance of the drafter model |",
        "|---|---|---|",
        "| questions | 1.80 to 1.70 | 0.653 to 0.250 |",
        "| code | 1.44 to 1.94 | 0.390 to – |",
    ]
    assert "first to last fifth" not in run_note("monday", [])
