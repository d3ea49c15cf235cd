"""What is computed of a server's answers: times between chunks, ratios to the server without learning."""

from itertools import islice

import pytest

from benchmarks.server.client import Outcome, draw_arrivals, make_requests
from benchmarks.server.cost import OFF, ServerRound, make_table, summarize
from benchmarks.server.server import parse_metrics


def outcome(*arrivals: float, tokens: int = 4, error: str = "") -> Outcome:
    return Outcome(
        began=0.0, ended=arrivals[-1] if arrivals else 1.0, arrivals=list(arrivals), tokens=tokens, error=error
    )


def test_times_are_those_of_whole_streams():
    found = summarize([outcome(1.0, 1.5, 2.5), outcome(2.0, 4.0), outcome(error="500")], {"updates": 3, "waiting": 2})
    assert found.tokens_per_second == 8 / 4
    assert found.first_token == 1.5
    assert found.chunks_p50 == 1.0
    assert found.chunks_p99 == pytest.approx(1.98)
    assert (found.errors, found.updates, found.waiting) == (1, 3, 2)


def test_the_text_of_a_stream_is_timed_and_its_tokens_are_the_servers():
    one = Outcome()
    for event in (
        {"choices": [{"text": "a"}]},
        {"choices": [{"delta": {"content": "b"}}]},
        {"choices": [{"text": ""}]},
    ):
        one.take(event)
    one.take({"choices": [], "usage": {"completion_tokens": 7}})
    assert (len(one.arrivals), one.tokens, one.error) == (2, 7, "")
    one.take({"error": {"code": "deadline"}})
    assert one.error


def test_requests_and_their_times_depend_on_the_seed_alone():
    first, again, other = (list(islice(make_requests(["a", "b", "c"], seed), 9)) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(one.prompt for one in first) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    at = draw_arrivals(5.0, 20.0, 0)
    assert at == draw_arrivals(5.0, 20.0, 0) == sorted(at)
    assert 60 < len(at) < 140
    assert at[-1] < 20


def test_ratios_are_paired_by_round():
    def round_of(p99: float) -> ServerRound:
        return ServerRound(10.0, 0.5, 0.01, p99, errors=0, updates=0, waiting=0)

    table = make_table({OFF: [round_of(0.02), round_of(0.04)], "live": [round_of(0.03), round_of(0.05)]})
    column = table.heads.index("between chunks, p99, ms")
    assert [row[column] for row in table.rows] == ["30.0", "40.0 (1.38, 1.25 to 1.50)"]


def test_metrics_are_summed_over_labels():
    name = "omnidraft:drafter_version"
    text = f'# TYPE {name} gauge\n{name}{{target="a"}} 2\n{name}{{target="b"}} 3\n'
    assert parse_metrics(text) == {"updates": 5.0}
