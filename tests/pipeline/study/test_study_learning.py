"""The study of ways to learn: its measurements at every token, and its tables."""

import json
from dataclasses import replace
from pathlib import Path

from study_making import record
from test_study_runner import config_of, runs_of
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.study.curves import learning_tables
from pipeline.study.definitions import STUDIES, StudyName
from pipeline.study.metrics import fifths, right_first_pieces
from pipeline.study.records import Key, Record, StudyFile
from pipeline.study.task import StudyTask, run_task

SETTINGS = {
    "draft__sources": ("model",), "draft__costs": "estimated", "batch": 2, "publish__enabled": False,
    "sampling__temperature": 0.0,
}  # fmt: skip


def run_arm(pair: TinyPair, arm: str, *, measures_places: bool = True) -> Record:
    study = STUDIES[StudyName.LEARNING]
    config = config_of(pair, **SETTINGS).with_overrides({**study.settings, **study.arm(arm).settings})
    return run_task(StudyTask(Key(pair.target, 0, arm), config, None, measures_places))


def test_every_arm_is_measured_at_the_same_places(tiny_pair: TinyPair):  # noqa: F811
    found = {arm: run_arm(tiny_pair, arm) for arm in ("baseline", "gradient, fixed", "least squares, states")}
    places = [{one.offset: one.places for one in run.passed} for run in found.values()]
    assert places[0] == places[1] == places[2]
    assert sum(places[0].values()) == sum(one.emitted for one in found["baseline"].passed)
    for run in found.values():
        assert all(0 <= one.first_right <= one.places for one in run.passed)
    assert found["baseline"].learning < found["gradient, fixed"].learning


def test_measuring_changes_no_draft(tiny_pair: TinyPair):  # noqa: F811
    for arm in ("gradient, fixed", "least squares, states"):
        runs = [run_arm(tiny_pair, arm, measures_places=measures) for measures in (False, True)]
        counts = [[(one.offset, one.blocks, one.judged, one.accepted) for one in run.passed] for run in runs]
        assert counts[0] == counts[1]
        assert {one.places for one in runs[0].passed} == {0}


def test_the_tables_follow_the_stream_by_fifths():
    run = record([2, 4, 6, 8, 10], arm="baseline")
    passed = tuple(replace(one, first_right=float(n), places=8) for n, one in enumerate(run.passed))
    run = replace(run, passed=passed, learning=1.25)
    assert [len(part) for part in fifths(run)] == [1, 1, 1, 1, 1]
    assert right_first_pieces(run.passed) == 10 / 40
    right, _, seconds = learning_tables({"baseline": [run], "least squares": []})
    assert right.heads == ("arm", *(f"prompt {n}" for n in range(1, 6)))
    assert right.rows == (
        ("baseline", "0.000", "0.125", "0.250", "0.375", "0.500"),
        ("least squares", *5 * ("–",)),
    )
    assert seconds.rows[0][-1] == "1.2"


def test_files_of_older_releases_are_read(tmp_path: Path):
    file = StudyFile(tmp_path / "study.json", {})
    file.add(record([2, 4, 6]))
    content = json.loads(file.path.read_text())
    for run in content["runs"]:
        del run["passed"]["first_right"], run["passed"]["places"]
    file.path.write_text(json.dumps(content))
    (read,) = StudyFile(file.path, {}).records.values()
    assert [one.places for one in read.passed] == [0, 0, 0]
    assert runs_of(file.path)
