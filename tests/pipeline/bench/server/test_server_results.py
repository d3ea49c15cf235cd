"""The arithmetic of the load generator's metrics, and the requests that it sends."""

from itertools import islice

import pytest

from pipeline.bench.server.client import LoadOutcomes, LoadRequest, Outcome, Workload, arrivals, requests
from pipeline.bench.server.learning_cost import OFF, ArmRound, ratios
from pipeline.bench.server.results import Percentiles, summarize_clients, summarize_server
from pipeline.bench.server.server import Sample, parse_metrics


def outcome(number: int, began: float, arrivals: list[float], ended: float, **fields) -> Outcome:
    request = LoadRequest(number, "text", chat=False, stream=fields.pop("stream", True), temperature=0.0, max_tokens=9)
    return Outcome(request, began=began, ended=ended, arrivals=arrivals, **fields)


def test_metrics_of_a_load():
    load = LoadOutcomes(
        began=100.0,
        seconds=10.0,
        outcomes=[
            outcome(0, 100.0, [101.0, 102.0, 104.0], 104.0, tokens=7, finish="length"),
            outcome(1, 101.0, [103.0], 103.0, tokens=5, finish="stop", stream=False, refused=2),
            outcome(2, 105.0, [106.0, 106.5], 106.5, finish="left"),
            outcome(3, 107.0, [], 108.0, error="400 invalid_prompt"),
            outcome(4, 108.0, [109.0, 112.0], 112.0, tokens=2, finish="stop"),  # ended too late to count as throughput
        ],
    )
    found = summarize_clients(load, clients=3)
    assert (found.requests, found.left, found.refused) == (5, 1, 2)
    assert found.errors == {"400 invalid_prompt": 1}
    assert found.tokens == 14
    assert found.tokens_per_second == pytest.approx(1.2)
    assert found.requests_per_second == pytest.approx(0.2)
    assert found.first_token == Percentiles.from_values([1.0, 1.0, 1.0])
    assert found.between_chunks == Percentiles.from_values([1.0, 2.0, 0.5, 3.0])
    # Seven tokens in three chunks: four of them arrive with another. Nothing is known of the request whose client left.
    assert found.between_tokens == Percentiles.from_values([1.0, 2.0, 0.5, 3.0, 0.0, 0.0, 0.0, 0.0])
    assert found.per_token == Percentiles.from_values([3.0 / 6, 3.0 / 1])
    assert found.end_to_end == Percentiles.from_values([4.0, 2.0, 4.0])


def test_quantiles_are_interpolated():
    assert Percentiles.from_values([1.0, 2.0, 3.0]) == Percentiles(3, 2.0, pytest.approx(2.8), pytest.approx(2.98))
    assert Percentiles.from_values([]) == Percentiles(0, 0.0, 0.0, 0.0)


def samples(count: int) -> list[Sample]:
    """One per second: from the middle on twice as much is accepted; 1 MB more per second."""
    accepted = [second + max(0, second - count // 2) for second in range(count)]
    return [
        Sample(
            float(second),
            {
                "proposed": 4.0 * second,
                "accepted": float(accepted[second]),
                "generated": 3.0 * second,
                "waiting": second % 3,
                "learner_lag": 2.0,
                "drafter_version": 7.0,
            },
            1_000_000 * second,
        )
        for second in range(count)
    ]


def test_metrics_of_a_server_over_time():
    found = summarize_server(samples(50))
    assert found.acceptance == pytest.approx((0.25, 0.5))
    assert found.tokens_per_second == pytest.approx((3.0, 3.0))
    assert found.memory == pytest.approx((4.5e6, 44.5e6))
    assert found.memory_slope == pytest.approx(60e6)
    assert found.waiting == (2, 1)
    assert (found.updates, found.learner_lag, found.learner_dropped) == (7.0, 2.0, None)
    assert found.block_efficiency is None


def test_a_server_without_metrics_has_no_results():
    found = summarize_server([Sample(float(second)) for second in range(20)])
    assert set(vars(found).values()) == {None}


def test_metrics_are_read_from_prometheus_text():
    text = (
        "# TYPE vllm:generation_tokens counter\n"
        'vllm:generation_tokens_total{model_name="a"} 3.0\n'
        'vllm:generation_tokens_total{model_name="b"} 4.0\n'
        "# TYPE vllm:num_requests_waiting gauge\n"
        'vllm:num_requests_waiting{model_name="a"} 2.0\n'
        "# TYPE other gauge\nother 9\n"
    )
    assert parse_metrics(text) == {"generated": 7.0, "waiting": 2.0}


def test_ratios_pair_the_rounds():
    def arm(*gaps: float) -> list[ArmRound]:
        loads = [
            LoadOutcomes(0.0, 9.0, [outcome(0, 0.0, [1.0, 1.0 + gap], 5.0, tokens=2, finish="stop")]) for gap in gaps
        ]
        return [ArmRound(summarize_clients(load), 0.0, 0.0) for load in loads]

    found = ratios({OFF: arm(1.0, 2.0, 4.0), "live": arm(1.5, 2.0, 4.8)})
    assert set(found) == {"live"}
    ratio = found["live"]["between chunks, p99"]
    assert ratio.rounds == pytest.approx([1.5, 1.0, 1.2])
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.2, 1.0, 1.5))


def test_requests_are_the_same_for_equal_seeds_and_follow_the_workload():
    workload = Workload(stream=0.5, chat=0.25, greedy=0.75, leave=0.5, max_tokens=(3, 5))
    found = list(islice(requests(["a", "b", "c"], workload, seed=4), 3000))
    assert found == list(islice(requests(["a", "b", "c"], workload, seed=4), 3000))
    assert found != list(islice(requests(["a", "b", "c"], workload, seed=5), 3000))
    assert [one.number for one in found] == list(range(3000))
    assert all({one.prompt for one in found[at : at + 3]} == {"a", "b", "c"} for at in range(0, 3000, 3))
    streams = [one for one in found if one.stream]
    assert len(streams) / 3000 == pytest.approx(0.5, abs=0.05)
    assert sum(one.chat for one in found) / 3000 == pytest.approx(0.25, abs=0.05)
    assert sum(one.temperature == 0 for one in found) / 3000 == pytest.approx(0.75, abs=0.05)
    assert sum(one.leave_after is not None for one in streams) / len(streams) == pytest.approx(0.5, abs=0.05)
    assert all(one.leave_after is None for one in found if not one.stream)
    assert {one.max_tokens for one in found} == {3, 5}


def test_arrivals_come_at_the_rate():
    found = arrivals(rate=20.0, seconds=100.0, seed=1)
    assert found == sorted(found)
    assert found == arrivals(20.0, 100.0, 1)
    assert found[0] > 0
    assert found[-1] < 100
    assert len(found) / 100 == pytest.approx(20, rel=0.1)
