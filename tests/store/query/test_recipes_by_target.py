"""The same id is a different token for each vocabulary, and each adapter numbers its own versions."""

from pathlib import Path

import pytest
from synthetic_runs import decision, make_rejection, write_run

from store.events import Translation
from store.query.log_reader import LogReader

LEFT = {"target": "left", "proposed_id": 7, "proposed_bytes": b"cat"}
RIGHT = {"target": "right", "proposed_id": 7, "proposed_bytes": b"dog"}


@pytest.fixture
def log(tmp_path: Path):
    events = [make_rejection(offset=offset, **LEFT) for offset in range(3)]
    events += [make_rejection(offset=offset, drafter_version=1, **RIGHT) for offset in range(3, 7)]
    events += [decision(offset=8, translation=Translation.NGRAM, pieces=(1, 2), **LEFT)]
    events += [decision(offset=9, translation=Translation.NGRAM, pieces=(1, 2, 3), **RIGHT)]
    with LogReader([write_run(tmp_path / "run", events)]) as reader:
        yield reader


def test_rejected_tokens_are_listed_by_target(log: LogReader):
    rows = log.recipe("rejected-tokens").to_pylist()
    assert [(row["target"], row["proposed"], row["rejected"]) for row in rows] == [
        ("right", "dog", 4),
        ("left", "cat", 3),
    ]


def test_n_grams_are_listed_by_target(log: LogReader):
    rows = log.recipe("ngrams-that-pay").to_pylist()
    assert [(row["target"], row["token"], row["accepted_pieces"]) for row in rows] == [
        ("right", "dog", 3),
        ("left", "cat", 2),
    ]


def test_versions_are_listed_by_target(log: LogReader):
    rows = log.recipe("acceptance-by-version").to_pylist()
    assert {(row["target"], row["drafter_version"]) for row in rows} == {("left", 0), ("right", 0), ("right", 1)}
