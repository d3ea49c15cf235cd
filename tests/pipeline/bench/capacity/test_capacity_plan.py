"""The plan for many workers: numbers computed by hand, no lost prompt, and no share that falls as traffic grows."""

from dataclasses import replace

import pytest

from pipeline.bench.capacity.inputs import CapacityInputs
from pipeline.bench.capacity.plan import (
    DAY,
    DECODING,
    Cluster,
    commits_per_worker,
    depth_of,
    full_at,
    learner_rate,
    plan,
)
from pipeline.bench.capacity.simulation import FEWEST, MOST, Flow, acceptance_between_changes, simulate
from store.errors import UsageError

FLOW = Flow(10.0, 0.01, 0.1, interval=4, arrival_seconds=0.5, waiting=256)
CLUSTER = Cluster(
    prompts_per_day=1e6,
    workers=100,
    learner_cores=1.0,
    network=1.25e9,
    publish_interval=64,
    update_interval=4,
    changes_per_day=24.0,
)
CURVE = ((0.0, 0.2), (10.0, 0.4), (30.0, 0.6))


def shares(cluster: Cluster, inputs: CapacityInputs | None = None) -> dict[str, float]:
    return {load.name: load.share for load in plan(cluster, inputs or CapacityInputs()).loads}


@pytest.mark.parametrize("waiting", [0, 3, 256])
@pytest.mark.parametrize("rate", [1.0, 20.0, 300.0])
def test_every_prompt_is_learned_from_dropped_or_waiting(rate: float, waiting: int):
    found = simulate(replace(FLOW, prompts_per_second=rate, waiting=waiting), 5000)
    assert found.posted == 5000 == found.taught + found.dropped + found.waiting
    assert found.updates == found.taught // FLOW.interval
    assert found.waiting <= waiting


def test_a_learner_without_cost_lags_by_one_prompt():
    found = simulate(Flow(10.0, 0.0, 0.0, interval=1, arrival_seconds=0.0, waiting=8), 5000)
    assert found.prompts == 1
    assert found.seconds == pytest.approx(0.1, rel=0.05)
    assert found.busy == 0


def test_an_interval_delays_by_half_of_itself():
    found = simulate(Flow(10.0, 0.0, 0.0, interval=9, arrival_seconds=0.0, waiting=8), 20_000)
    assert found.prompts == pytest.approx((9 + 1) / 2, rel=0.02)


def test_a_late_arrival_adds_the_prompts_that_arrive_meanwhile():
    at_once, late = (simulate(Flow(10.0, 0.0, 0.0, 4, seconds, 8), 20_000) for seconds in (0.0, 3.0))
    assert late.prompts - at_once.prompts == pytest.approx(3.0 * 10, rel=0.05)
    assert late.seconds - at_once.seconds == pytest.approx(3.0, rel=0.05)


def test_a_learner_is_busy_for_the_time_of_its_work():
    found = simulate(FLOW, 20_000)
    assert found.busy == pytest.approx(10 * (0.01 + 0.1 / 4), rel=0.05)
    assert found.dropped == 0


def test_a_learner_that_is_too_slow_takes_in_what_it_can():
    found = simulate(replace(FLOW, prompts_per_second=280.0), 20_000)
    pace = 1 / (0.01 + 0.1 / 4)
    assert found.busy == pytest.approx(1.0, abs=0.01)
    assert found.taught / found.posted == pytest.approx(pace / 280, rel=0.05)
    waited, made, until_the_next = FLOW.waiting / 280, 0.11, FLOW.interval / pace / 2
    assert found.seconds == pytest.approx(waited + made + FLOW.arrival_seconds + until_the_next, rel=0.05)


def test_the_same_seed_finds_the_same():
    assert simulate(FLOW, 2000, seed=3) == simulate(FLOW, 2000, seed=3) != simulate(FLOW, 2000, seed=4)


def test_weights_that_have_not_arrived_are_late_by_their_arrival_time():
    found = simulate(replace(FLOW, arrival_seconds=1e9), 1000)
    assert (found.updates, found.served) == (250, 0)
    assert found.prompts == pytest.approx(10 * 1e9)


def test_a_simulation_is_long_enough_for_several_arrivals():
    slow = replace(FLOW, arrival_seconds=3000.0)
    assert simulate(slow, slow.long_enough).served > 0
    assert FLOW.long_enough == FEWEST
    assert replace(FLOW, arrival_seconds=1e9).long_enough == MOST


def test_acceptance_follows_the_curve():
    assert acceptance_between_changes(CURVE, 10, 1.0, 0.0) == pytest.approx(0.3)
    assert acceptance_between_changes(CURVE, 30, 1.0, 0.0) == pytest.approx((10 * 0.3 + 20 * 0.5) / 30)
    assert acceptance_between_changes(CURVE, 1e9, 1.0, 0.0) == pytest.approx(0.6)


def test_acceptance_stays_at_its_beginning_while_weights_are_late():
    assert acceptance_between_changes(CURVE, 20, 1.0, 10.0) == pytest.approx((10 * 0.2 + 10 * 0.3) / 20)
    assert acceptance_between_changes(CURVE, 20, 1.0, 500.0) == pytest.approx(0.2)
    assert acceptance_between_changes(CURVE, 20, 0.0, 0.0) == pytest.approx(0.2)


def test_half_of_the_examples_take_twice_as_long():
    assert acceptance_between_changes(CURVE, 60, 0.5, 0.0) == pytest.approx(
        acceptance_between_changes(CURVE, 30, 1.0, 0.0)
    )


@pytest.mark.parametrize(
    ("receivers", "fan_out", "depth"), [(1, 2, 1), (2, 2, 1), (3, 2, 2), (6, 2, 2), (7, 2, 3), (1000, 2, 9)]
)
def test_weights_are_forwarded_as_often_as_the_fan_out_requires(receivers: int, fan_out: int, depth: int):
    assert depth_of(receivers, fan_out) == depth


def test_forwarding_weights_relieves_the_learner_and_delivers_sooner():
    busy = replace(CLUSTER, workers=1000, prompts_per_day=1e8, update_interval=64)
    tree = replace(busy, fan_out=2)
    name = "weights from the learner"
    assert shares(tree)[name] < shares(busy)[name] / 50
    assert plan(tree, CapacityInputs()).staleness.seconds < plan(busy, CapacityInputs()).staleness.seconds


def test_a_quiet_worker_commits_each_prompt_and_a_busy_one_by_time_or_count():
    inputs = CapacityInputs()
    at = [replace(CLUSTER, workers=1, prompts_per_day=rate * DAY) for rate in (0.05, 5.0, 2560.0)]
    assert [commits_per_worker(one, inputs) for one in at] == pytest.approx([0.05, 0.1, 10.0])


@pytest.mark.parametrize("more", [2, 10, 1000])
def test_no_share_falls_with_more_traffic(more: int):
    before, after = shares(CLUSTER), shares(replace(CLUSTER, prompts_per_day=more * CLUSTER.prompts_per_day))
    assert all(after[name] >= share for name, share in before.items())
    assert after["learning"] == pytest.approx(more * before["learning"])


def test_more_workers_decode_more_and_write_no_less():
    before, after = plan(CLUSTER, CapacityInputs()), plan(replace(CLUSTER, workers=1000), CapacityInputs())
    assert shares(after.cluster)[DECODING] == pytest.approx(shares(before.cluster)[DECODING] / 10)
    assert after.sizes["parts of the log"] >= before.sizes["parts of the log"]
    assert after.sizes["versions"] == before.sizes["versions"]


def test_a_larger_drafter_costs_in_proportion():
    large = CapacityInputs().with_numbers({"drafter_parameters": 68e6})
    assert large.weights - CapacityInputs().weights == 4 * (68e6 - CapacityInputs().drafter_parameters)
    assert learner_rate(CLUSTER, large) < learner_rate(CLUSTER, CapacityInputs())
    assert plan(CLUSTER, large).sizes["versions, bytes"] > 20 * plan(CLUSTER, CapacityInputs()).sizes["versions, bytes"]


def test_the_learner_is_saturated_at_its_rate():
    assert full_at(CLUSTER, CapacityInputs(), "learning") == pytest.approx(
        learner_rate(CLUSTER, CapacityInputs()) * DAY
    )


def test_a_resource_without_load_is_never_saturated():
    assert full_at(CLUSTER, CapacityInputs().with_numbers({"driver_seconds": 0}), "routing prompts") is None


def test_the_first_bottleneck_is_the_fullest_share_but_workers_can_be_added():
    found = plan(replace(CLUSTER, workers=2), CapacityInputs().with_numbers({"worker_prompts": 6.0}))
    assert found.loads[0].name == DECODING
    assert found.bottleneck is found.loads[1]
    assert found.loads == tuple(sorted(found.loads, key=lambda load: -load.share))
    assert plan(replace(CLUSTER, workers=1), CapacityInputs()).bottleneck.name == DECODING


def test_staleness_costs_acceptance_and_more_so_with_frequent_changes():
    inputs = CapacityInputs()
    calm, wild = (plan(replace(CLUSTER, changes_per_day=changes), inputs) for changes in (1.0, 2000.0))
    assert inputs.curve[0][1] < wild.acceptance < wild.acceptance_at_once < calm.acceptance <= inputs.curve[-1][1]


def test_a_drafter_that_cannot_be_trained_in_time_keeps_its_acceptance():
    stuck = CapacityInputs().with_numbers({"update_seconds": 1e9})
    assert plan(CLUSTER, stuck).acceptance == pytest.approx(stuck.curve[0][1])


def test_every_input_has_a_source():
    assert all(CapacityInputs().sources().values())
    assert CapacityInputs().sources().keys() == vars(CapacityInputs()).keys()


def test_acceptance_grows_with_the_examples_of_the_curve():
    examples, acceptances = zip(*CapacityInputs().curve, strict=True)
    assert examples[0] == 0
    assert list(examples) == sorted(set(examples))
    assert acceptances[0] == min(acceptances) < acceptances[-1] == max(acceptances)


@pytest.mark.parametrize(
    "given", [{"nonsense": 1.0}, {"points": "many"}, {"points": -1.0}, {"points": float("nan")}, {"curve": 1}]
)
def test_an_invalid_input_is_refused(given: dict[str, object]):
    with pytest.raises(UsageError, match="--figure must be NAME=NUMBER"):
        CapacityInputs().with_numbers(given)


def test_times_of_the_workers_and_the_learner_are_the_production_constants():
    from pipeline.cluster.learner import HEAD_SECONDS
    from pipeline.cluster.worker import WORK_SECONDS

    assert (CapacityInputs().portion_seconds, CapacityInputs().head_seconds) == (WORK_SECONDS, HEAD_SECONDS)


def test_a_head_is_sent_by_time_when_updates_are_rare():
    rare = plan(replace(CLUSTER, update_interval=100_000), CapacityInputs()).sizes
    assert rare["updates"] == pytest.approx(10)
    assert rare["weights sent by the learner"] == pytest.approx(DAY / CapacityInputs().head_seconds)


def test_commits_are_those_of_the_settings():
    from pipeline.config.sections import CommitSettings

    settings = CommitSettings()
    assert (CapacityInputs().commit_seconds, CapacityInputs().commit_prompts) == (settings.seconds, settings.prompts)
