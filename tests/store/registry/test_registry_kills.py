"""A failure or a kill between any two calls to MLflow leaves every object in the store exactly once."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from registry_making import Faults, FaultyClient, check, new_store, send

import store.registry.mlflow_sender

ROOT = Path(__file__).parents[3]
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])}
CALLS = 66  # to MLflow, in the small run of registry_making
HOW = ("before", "after", "twice")
SHORT = [(at, HOW[at % 3]) for at in range(1, CALLS + 1, 8)]
KILLED = """
import os, signal, sys
from pathlib import Path
import registry_making, store.registry.mlflow_sender
uri, folder, at, how = sys.argv[1:]
faults = registry_making.Faults(int(at), how, lambda: os.kill(os.getpid(), signal.SIGKILL))
store.registry.mlflow_sender.connect = lambda uri: registry_making.FaultyClient(uri, faults)
registry_making.send(uri, Path(folder))
"""


def run_with(folder: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = new_store(folder)
    monkeypatch.setattr(store.registry.mlflow_sender, "connect", lambda uri: FaultyClient(uri, faults))
    send(uri, folder)
    check(uri, folder)


def test_the_sweeps_cover_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    faults = Faults()
    run_with(tmp_path / "runs", faults, monkeypatch)
    assert len(faults.calls) == CALLS, "set CALLS to the number of calls"
    assert [name for name in faults.calls if name.startswith("create_")] == [
        *("create_experiment", "create_run"),
        *("create_run", "create_logged_model", "create_registered_model", "create_model_version"),
        *("create_run", "create_logged_model", "create_model_version"),
    ]


@pytest.mark.slow
@pytest.mark.representatives(3)
@pytest.mark.parametrize(("at", "how"), SHORT)
def test_a_call_that_fails_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, how: str):
    run_with(tmp_path / "runs", Faults(at, how), monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("at", "how"), [(at, how) for at in range(1, CALLS + 1) for how in HOW if (at, how) not in SHORT]
)
def test_any_call_that_fails_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, how: str):
    run_with(tmp_path / "runs", Faults(at, how), monkeypatch)


def test_an_object_of_an_abandoned_call_is_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    faults = Faults(late="log_artifact")
    run_with(tmp_path / "runs", faults, monkeypatch)
    assert len(faults.made) == 9


@pytest.mark.slow
@pytest.mark.parametrize(("at", "how"), [(26, "after")])
def test_a_process_that_is_killed_in_a_call_leaves_no_trace(tmp_path: Path, at: int, how: str):
    kill_and_send_again(tmp_path / "runs", at, how)


@pytest.mark.sweep
@pytest.mark.parametrize(("at", "how"), [(at, how) for at in range(1, CALLS + 1) for how in HOW[:2]])
def test_a_process_may_be_killed_in_any_call(tmp_path: Path, at: int, how: str):
    kill_and_send_again(tmp_path / "runs", at, how)


def kill_and_send_again(folder: Path, at: int, how: str) -> None:
    uri = new_store(folder)
    command = [sys.executable, "-c", KILLED, uri, str(folder), str(at), how]
    killed = subprocess.run(command, check=False, cwd=ROOT, env=os.environ | PATHS)
    assert killed.returncode == -signal.SIGKILL
    shutil.rmtree(folder / "run-a", ignore_errors=True)  # the sealed folders, which `send` makes again
    send(uri, folder)
    check(uri, folder)
