"""A learner service gives the same updates, drift responses and versions as a local learner."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import constants
from learner_hosting import (
    NOBODY,
    RecordingLearner,
    learn_from,
    make_config,
    make_learner_config,
    make_service,
    run_local_learner,
    write_log,
)
from replaying import table_of
from tiny_pair import TinyPair

from pipeline.config.settings import Config
from store.errors import RunError
from store.events import Drifted, Recalled, Updated, VersionPublished
from store.log import run_log as log_module
from store.log.manifest import read_manifest
from store.log.partitions import LEARNER, partition_folder
from store.registry.version_folder import open_version

PROMPTS = 14
DRIFTING = {
    "draft__sources": ("model",),  # drift is that of the model's acceptance
    "publish__enabled": True,
    "publish__interval": 2,
    "sampling__temperature": 1.0,
}
CONSTANTS = {
    "drift_threshold": 0.02,
    "drift_grace": 1,
    "drift_tolerance": 0.0,
    "drift_cooldown": 3,
    "recall_margin": 0.5,  # so that no version is put on trial, which would outlast the stream
}
pytestmark = pytest.mark.constants(**CONSTANTS)
CASES: dict[str, dict[str, Any]] = {
    "updates": {},
    "seldom and gated": {"learn__spacing": "paying", "draft__sources": ("model",)},
    "a small cache": {"cache__budget_bytes": 2000, "publish__enabled": True},
    "drift": DRIFTING,
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Settings, and a local learner that ran over the stream."""
    config = make_config(tiny_pair, **CASES[request.param])
    with constants(**CONSTANTS):
        return config, run_local_learner(config, tmp_path_factory.mktemp("local") / "run", PROMPTS)


@pytest.mark.slow
def test_a_service_gives_the_events_of_a_local_learner(case: tuple[Config, RecordingLearner], tmp_path: Path):
    config, learner = case
    with make_service(make_learner_config(config, tmp_path / "run")) as service:
        events = learn_from(service, learner.finished)
        service.end(0.1)
        events += learn_from(service, [])
    assert events == learner.events
    assert any(isinstance(event, Updated) and event.served for event in events)


@pytest.mark.slow
def test_a_service_that_is_stopped_at_any_point_gives_the_same_events(
    case: tuple[Config, RecordingLearner], tmp_path: Path
):
    """Every part runs in a new service from the last checkpoint; the prompts are in the server's log."""
    config, learner = case
    setup, events = make_learner_config(config, tmp_path / "run"), []
    write_log(setup.run_folder, [finished.prompt for finished in learner.finished])
    for begin in range(0, PROMPTS, 5):
        with make_service(setup) as service:
            events += learn_from(service, learner.finished[begin : begin + 5])
            service.pause(0.1)
    with make_service(setup) as service:
        service.end(0.1)
        events += learn_from(service, [])
    assert events == learner.events


def test_the_drift_case_has_drifts_recalls_and_versions(tiny_pair: TinyPair, tmp_path: Path):
    events = run_local_learner(make_config(tiny_pair, **DRIFTING), tmp_path / "run", PROMPTS).events
    assert [event for event in events if isinstance(event, Drifted) and event.acted_upon]
    assert [event for event in events if isinstance(event, Recalled)]
    assert len([event for event in events if isinstance(event, VersionPublished)]) >= 4


@pytest.fixture(scope="module")
def recorded(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RecordingLearner]:
    """Settings and a local learner of a stream whose log is committed by its updates alone."""
    config = make_config(tiny_pair, commit__seconds=1000.0, drift__detector="none")
    with constants(**CONSTANTS):
        return config, run_local_learner(config, tmp_path_factory.mktemp("local") / "run", PROMPTS)


@pytest.mark.slow
def test_weights_are_committed_before_they_are_given_out(
    recorded: tuple[Config, RecordingLearner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The order holds on a slow disk too."""
    config, learner = recorded
    run = tmp_path / "run"
    reach = log_module.fault_point
    monkeypatch.setattr(log_module, "fault_point", lambda place: (time.sleep(0.1), reach(place)))
    given_out = []
    with make_service(make_learner_config(config, run)) as service:
        assert service.take_new_weights() is None, "the first weights are known already"
        for finished in learner.finished:
            service.on_prompt_completed(finished)
            if weights := service.take_new_weights():
                given_out.append(weights.drafter_version)
                known = table_of(partition_folder(run, LEARNER), "updates").to_pylist()
                assert weights.drafter_version in {0, *(row["drafter_version"] for row in known)}
                assert weights.head_version in {0, *(row["head_version"] for row in known)}
                assert service.take_new_weights() is None, "once"
        service.pause(0.1)
    updates = [event.drafter_version for event in learner.events if isinstance(event, Updated) and event.served]
    assert set(given_out) >= {version for version in updates if version} != set()


def test_new_weights_are_those_of_the_last_update(recorded: tuple[Config, RecordingLearner], tmp_path: Path):
    """They are given out resumed by a service that resumes."""
    config, learner = recorded
    setup, last = make_learner_config(config, tmp_path / "run"), None
    with make_service(setup) as service:
        first = [weight.clone() for weight in service._models.drafter.trained_weights]
        for finished in learner.finished:
            service.on_prompt_completed(finished)
            last = service.take_new_weights() or last
        service.pause(0.1)
    assert last is not None
    assert not all(map(torch.equal, first, last.drafter))
    with make_service(setup) as service:
        resumed = service.take_new_weights()
    assert resumed is not None
    assert resumed.drafter_version == last.drafter_version > 0
    assert all(map(torch.equal, resumed.drafter, last.drafter))


def test_the_end_finishes_the_log(tiny_pair: TinyPair, tmp_path: Path):
    config = make_config(tiny_pair, publish__enabled=True, publish__interval=4)
    learner = run_local_learner(config, tmp_path / "local", 6)
    setup = make_learner_config(config, tmp_path / "run")
    with make_service(setup) as service:
        learn_from(service, learner.finished)
        assert not service.end(0.1), f"no server listens at {NOBODY}"
    folder = partition_folder(setup.run_folder, LEARNER)
    assert read_manifest(folder).finished
    versions = table_of(folder, "versions").to_pylist()
    assert [row["version"] for row in versions] == list(range(len(versions)))
    for row in versions:
        assert open_version(setup.run_folder / row["folder"])["digest"] == row["digest"]
    with pytest.raises(RunError):
        make_service(setup)


def test_two_services_never_write_one_partition(tiny_pair: TinyPair, tmp_path: Path):
    setup = make_learner_config(make_config(tiny_pair), tmp_path / "run")
    with make_service(setup), pytest.raises(RunError, match="must not be written by two processes"):
        make_service(setup)


def test_prompts_after_the_last_commit_are_lost(recorded: tuple[Config, RecordingLearner], tmp_path: Path):
    """A service that dies leaves its last commit: the next one resumes from it."""
    config, learner = recorded
    setup = make_learner_config(config, tmp_path / "run")
    with make_service(setup) as service:
        for finished in learner.finished[:5]:
            service.on_prompt_completed(finished)
            service.take_new_weights()
        version = service._given_out[0]
        service.on_prompt_completed(learner.finished[5])  # without another commit
    assert version > 0
    with make_service(setup) as service:
        assert service.learner.drafter_version == version
        known = table_of(partition_folder(setup.run_folder, LEARNER), "updates").to_pylist()
        assert max(row["drafter_version"] for row in known) == version
        service.pause(0.1)
