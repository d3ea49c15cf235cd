"""The table of runs, and the default run."""

import os
from pathlib import Path

import pytest
from event_making import make_completed
from stream_making import append, stream, write

from dashboards.web import overview
from dashboards.web.logs import Logs, default_runs
from store.log.lock import RunLock
from store.log.manifest import MANIFEST, PREVIOUS
from store.log.run_log import RunLog


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with a drift, one without judged tokens, one that was stopped, and an empty one, the newest."""
    folder = tmp_path / "runs"
    write(folder / "20261121-114049", stream())
    write(folder / "plain", [make_completed(offset, judged=0, accepted=0) for offset in range(3)])
    with RunLog(folder / "stopped") as log:
        append(log, stream(20), commit=True)
        log.close()  # before the end of its stream
    (folder / "stopped" / ".lock").touch()
    write(folder / "empty", [])
    for age, name in enumerate(("empty", "stopped", "plain", "20261121-114049")):
        os.utime(folder / name / "log" / "manifest.json", (1e9 - age, 1e9 - age))
    return folder


def test_each_run_has_its_state_and_totals(runs: Path):
    rows = {row["run"]: row for row in overview.list_runs(Logs(None, runs))}
    assert list(rows) == ["empty", "stopped", "plain", "20261121-114049"]
    learned = rows["20261121-114049"]
    assert (learned["prompts"], learned["tokens"], learned["targets"]) == (60, 300, ["big"])
    assert learned["datasets"] == ["docs", "code"], "in the order of the stream"
    assert (learned["accepted"], learned["judged"], learned["acceptance"]) == (90, 240, 0.375)
    assert learned["low"] < 0.375 < learned["high"]
    assert learned["times"] is None, "no block drew its action"
    assert (learned["speed"], learned["efficiency"]) == (5.0, 2.5)
    assert (learned["drifts"], learned["versions"], learned["state"]) == (1, 4, "finished")
    assert learned["started"] == 1_795_261_249  # 2026-11-21 11:40:49 UTC
    assert (rows["plain"]["judged"], rows["plain"]["acceptance"], rows["plain"]["low"]) == (0, None, None)
    assert (rows["stopped"]["state"], rows["stopped"]["prompts"]) == ("stopped", 20)
    assert (rows["empty"]["state"], rows["empty"]["prompts"], rows["empty"]["targets"]) == ("finished", 0, [])


@pytest.mark.parametrize(
    ("settings", "learns"),
    [
        ('{"learn": {"enabled": true}}', True),
        ('{"learn": {"enabled": false}}', False),
        ('{"learn": 3}', None),
        ("{", None),
    ],
)
def test_whether_a_run_learns_is_read_from_its_settings(runs: Path, settings: str, learns: bool | None):
    (runs / "plain" / "config.json").write_text(settings)
    rows = {row["run"]: row["learning"] for row in overview.list_runs(Logs(None, runs))}
    assert (rows["plain"], rows["stopped"]) == (learns, None)


def test_a_run_that_is_being_written_is_running(runs: Path):
    with RunLock(runs / "stopped"):
        states = {state.name: state.activity for state in Logs(None, runs).states()}
    assert (states["stopped"], states["plain"]) == ("running", "finished")


def test_the_newest_run_with_a_prompt_is_the_default(runs: Path):
    logs = Logs(None, runs)
    assert default_runs(logs.states()) == ["stopped"]
    assert list(logs.choose_runs([])) == ["stopped"]
    assert default_runs([state for state in logs.states() if state.name == "empty"]) == ["empty"]


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs: Path):
    for name in (MANIFEST, PREVIOUS):
        (runs / "plain" / name).write_text("{")
    rows = {row["run"]: row for row in overview.list_runs(Logs(None, runs))}
    assert "manifest.json" in rows["plain"]["problem"]
    assert rows["stopped"]["judged"] == 80
