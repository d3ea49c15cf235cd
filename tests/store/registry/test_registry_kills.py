"""A failure or a kill in any call to MLflow leaves in the store what an uninterrupted run leaves there."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from registry_making import Faults, FaultyClient, check_files, new_store, play, read_store, send, sync_until_sent

import store.registry.mlflow_sync
from store.registry.registry import default_uri

ROOT = Path(__file__).parents[3]
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
CALLS = 82  # to MLflow, for the small run of registry_making
HOW = ("before", "after", "twice")
SHORT = [(at, HOW[at % 3]) for at in range(1, CALLS + 1, 12)]
KILLED = """
import os, signal, sys
from pathlib import Path
import registry_making, store.registry.mlflow_sync
uri, folder, at, how = sys.argv[1:]
faults = registry_making.Faults(int(at), how, lambda: os.kill(os.getpid(), signal.SIGKILL))
store.registry.mlflow_sync.connect = lambda uri: registry_making.FaultyClient(uri, faults)
registry_making.send(uri, Path(folder))
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What MLflow holds of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    send(new_store(folder), folder / "run-a")
    return read_store(default_uri(folder))


def send_with(folder: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    uri = new_store(folder)
    monkeypatch.setattr(store.registry.mlflow_sync, "connect", lambda uri: FaultyClient(uri, faults))
    send(uri, folder / "run-a")
    check_files(uri, folder / "run-a")
    return read_store(uri)


def test_the_sweeps_cover_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, Any]):
    faults = Faults()
    assert send_with(tmp_path, faults, monkeypatch) == uninterrupted
    assert len(faults.calls) == CALLS, "set CALLS to the number of calls"
    assert [name for name in faults.calls if name.startswith("create_")] == [
        *("create_experiment", "create_run", "create_registered_model"),
        *("create_run", "create_logged_model", "create_model_version"),
        *("create_run", "create_logged_model", "create_model_version"),
    ]


@pytest.mark.slow
@pytest.mark.representatives(3)
@pytest.mark.parametrize(("at", "how"), SHORT)
def test_a_call_that_fails_changes_nothing(tmp_path, monkeypatch, uninterrupted, at: int, how: str):
    assert send_with(tmp_path, Faults(at, how), monkeypatch) == uninterrupted


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("at", "how"), [(at, how) for at in range(1, CALLS + 1) for how in HOW if (at, how) not in SHORT]
)
def test_any_call_that_fails_changes_nothing(tmp_path, monkeypatch, uninterrupted, at: int, how: str):
    assert send_with(tmp_path, Faults(at, how), monkeypatch) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize(("at", "how"), [(40, "after")])
def test_a_process_that_is_killed_in_a_call_changes_nothing(tmp_path: Path, uninterrupted, at: int, how: str):
    kill_and_send_again(tmp_path, at, how, uninterrupted)


@pytest.mark.sweep
@pytest.mark.parametrize(("at", "how"), [(at, how) for at in range(1, CALLS + 1) for how in HOW[:2]])
def test_a_process_may_be_killed_in_any_call(tmp_path: Path, uninterrupted, at: int, how: str):
    kill_and_send_again(tmp_path, at, how, uninterrupted)


def kill_and_send_again(folder: Path, at: int, how: str, uninterrupted: dict[str, Any]) -> None:
    uri, there = new_store(folder), folder / "run-a"
    command = [sys.executable, "-c", KILLED, uri, str(there), str(at), how]
    killed = subprocess.run(command, check=False, cwd=ROOT, env=os.environ | PATHS)
    assert killed.returncode == -signal.SIGKILL
    for _ in continue_run(there):
        sync_until_sent(there, uri)
    check_files(uri, there)
    assert read_store(uri) == uninterrupted


def continue_run(folder: Path) -> Any:
    """Make the run again, with the identity that MLflow knows, as a run does that resumes from its first commit."""
    described = (folder / "mlflow.json").read_bytes()

    shutil.rmtree(folder)
    for run in play(folder):
        (folder / "mlflow.json").write_bytes(described)
        yield run


@pytest.mark.parametrize("commits", range(5))
def test_one_update_after_an_outage_sends_what_many_send(tmp_path: Path, uninterrupted, commits: int):
    uri = new_store(tmp_path)
    for number, run in enumerate(play(tmp_path / "run-a")):
        if number >= commits:
            sync_until_sent(run.folder, uri)
    assert read_store(uri) == uninterrupted
