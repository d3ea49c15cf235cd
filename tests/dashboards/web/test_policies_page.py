"""The values of policies, compared with sums that can be computed by hand, and their page."""

from pathlib import Path
from typing import Any

import pytest
from serving_runs import Serve
from stream_making import prompt, write

from dashboards.web.queries.policies import read_policies
from store.events import Action, BlockDone, Event
from store.query.log_reader import LogReader


def make_drawn(offset: int, action: Action, emitted: int, seconds: float, propensity: float = 0.5) -> list[Event]:
    """Make a prompt of two blocks: the first reads the prompt and does not count, the second draws its action."""
    counts = {"drafted": 4, "proposed": 4, "judged": 4, "accepted": emitted - 1, "emitted": emitted}
    return [
        BlockDone(offset, "docs", block, 1, *counts.values(), 0.0, 0.0, seconds, action=action, propensity=propensity)
        for block in range(2)
    ] + [prompt(offset)]


def two_policies(prompts: int = 40, slow: float = 1.0) -> list[Event]:
    """Copies emit 3 or 5 tokens in 0.5 s, no draft emits 1 token in `slow` seconds."""
    events: list[Event] = []
    for offset in range(prompts):
        events += make_drawn(2 * offset, Action.COPIES, 3 if offset % 2 else 5, 0.5)
        events += make_drawn(2 * offset + 1, Action.NOTHING, 1, slow)
    return events


def read(folder: Path, events: list[Event]) -> dict[str, Any]:
    with LogReader([write(folder, events)]) as log:
        return read_policies(log)


def test_each_policy_has_rates_with_intervals(tmp_path: Path):
    found = read(tmp_path / "run", two_policies())
    rows = {row["action"]: row for row in found["policies"]}
    assert [row["action"] for row in found["policies"]] == ["copies", "as run", "nothing"], "the fastest is first"
    assert rows["copies"]["per_forward"]["value"] == 4
    assert rows["copies"]["per_forward"]["half"] == pytest.approx(1.959964 / 40**0.5), "the deviation is one token"
    assert rows["copies"]["per_second"]["value"] == 8
    assert rows["nothing"]["per_second"] == {"value": 1, "low": 1, "high": 1, "half": 0}
    assert rows["as run"]["per_second"]["value"] == pytest.approx(200 / 60)
    assert rows["copies"]["blocks"] == 40
    assert not rows["copies"]["is_vague"]


def test_the_fastest_policy_is_compared_with_the_run(tmp_path: Path):
    (story,) = read(tmp_path / "run", two_policies())["story"]
    assert story["sentences"] == [
        "The run itself decoded 3.3 ± 0.7 tokens/s.",
        "Without drafts it would be 1.0 ± 0.0: the run is 3.33 times as fast (2.69 to 4.13).",
        "The fastest single policy is copies: in every block it would give 8.0 ± 0.6.",
        "The intervals do not overlap: that policy alone would have been faster.",
    ]


@pytest.mark.parametrize(
    ("prompts", "slow", "end"),
    [
        (3, 1.0, "Fewer than 30 blocks drew copies or no draft: a rough estimate."),
        (40, 0.14, "The intervals overlap, so neither is clearly faster."),
    ],
)
def test_an_unclear_result_is_reported(tmp_path: Path, prompts: int, slow: float, end: str):
    (story,) = read(tmp_path / "run", two_policies(prompts, slow))["story"]
    assert end in story["sentences"]


def test_the_page_has_a_chart_and_a_table(serve: Serve, tmp_path: Path, page: Any):
    write(tmp_path / "runs" / "drawn", two_policies())
    address = serve(tmp_path / "runs")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}/policies")
    page.wait_for_selector("#chart .scatterlayer .trace")
    assert "would give 8.0 ± 0.6." in page.inner_text("#story")
    cells = page.eval_on_selector_all("#policies tbody tr", "rows => rows.map(row => row.cells[1].textContent)")
    assert cells == ["8.0 ± 0.6 ▲", "3.3 ± 0.7", "1.0 ± 0.0"]
    points = "document.getElementById('chart').data.map(trace => [trace.xaxis, trace.x.length])"
    assert page.evaluate(points) == [["x", 3], ["x2", 3]]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
