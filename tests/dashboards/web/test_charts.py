"""The data of the charts: versions, drifts, n-grams and sources."""

from pathlib import Path

import pytest
from event_making import make_drifted, make_published, make_updated
from stream_making import prompt, write

from dashboards.web.queries import versions
from store.query.log_reader import LogReader


def test_the_later_of_two_versions_at_one_prompt_is_in_service(tmp_path: Path):
    last = range(9, 100, 10)  # the last prompts of intervals; at each next prompt a drift is detected
    events = [prompt(offset) for offset in range(110)]
    events += [
        make_updated(offset=15, seconds=1.5),
        make_updated(offset=16, part="head", seconds=0.25),
        make_published(),
    ]
    for number, offset in enumerate(last):
        events += [
            make_published(offset=offset, version=2 * number + 1, parent=2 * number, reason="interval"),
            make_drifted(offset=offset + 1),
            make_published(offset=offset, version=2 * number + 2, parent=2 * number + 1, reason="drift"),
        ]
    with LogReader([write(tmp_path / "run", events)]) as log:
        found = versions.read_versions(log)
    assert [row["version"] for row in found["versions"]] == list(range(21))
    served = [(row["version"], row["prompts"]) for row in found["versions"] if row["prompts"]]
    assert served == [(even, 10) for even in range(0, 21, 2)]
    learned = [(row["version"], row["learned"]) for row in found["versions"] if row["learned"]]
    assert [(version, one["steps"], one["seconds"]) for version, one in learned] == [(2, 1, 1.75)], "both parts"


def test_each_run_has_its_last_versions_and_drifts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "MOST_VERSIONS", 2)
    events = [prompt(0)] + [make_drifted(offset=number) for number in range(3)]
    events += [
        make_published(offset=number, version=number, parent=number - 1 if number else None) for number in range(3)
    ]
    runs = [write(tmp_path / name, events) for name in ("a", "b")]
    with LogReader(runs) as log:
        found = versions.read_versions(log)
    last = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert [(row["run"], row["version"]) for row in found["versions"]] == last
    assert [(row["run"], row["offset"]) for row in found["drifts"]] == last
    assert found["total"] == 6
