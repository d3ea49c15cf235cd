"""A learner that stands somewhere else learns, answers and publishes what it would beside the loop."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_hosting import NOBODY, NotedCoach, embedded, fed, host_config, host_of, logged, setup_of
from replaying import table_of
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.config import Config
from store import log as log_module
from store.errors import RunError
from store.events import Drifted, Recalled, Updated, VersionPublished
from store.manifest import read_manifest
from store.partitions import LEARNER, partition_folder
from store.version_folder import open_version

PROMPTS = 14
DRIFTING = {
    "publish__enabled": True,
    "publish__interval": 2,
    "publish__probe": False,
    "drift__threshold": 0.1,
    "drift__grace": 1,
    "drift__tolerance": 0.0,
    "drift__cooldown": 3,
    "drift__recall_margin": 0.0,
}
CASES: dict[str, dict[str, Any]] = {
    "updates": {},
    "seldom and gated": {"learn__spacing": "paying", "learn__gate_share": 0.5},
    "a small cache": {"cache__budget_bytes": 2000, "publish__enabled": True, "publish__probe": False},
    "drift": DRIFTING,
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: F811
    """Settings, and what a coach beside the loop made of the stream."""
    config = host_config(tiny_pair, **CASES[request.param])
    return config, embedded(config, tmp_path_factory.mktemp("embedded") / "run", PROMPTS)


def test_it_says_what_a_coach_beside_the_loop_says(case: tuple[Config, NotedCoach], tmp_path: Path):
    config, coach = case
    with host_of(setup_of(config, tmp_path / "run")) as host:
        told = fed(host, coach.finished)
        host.end({}, [], 0.1)
        told += fed(host, [])
    assert told == coach.said
    assert any(isinstance(event, Updated) and event.served for event in told)


def test_it_makes_no_difference_where_it_was_stopped(case: tuple[Config, NotedCoach], tmp_path: Path):
    """Each part by a host of its own, from the checkpoint of the one before; the prompts are in the server's log."""
    config, coach = case
    setup, told = setup_of(config, tmp_path / "run"), []
    logged(setup.run_folder, [finished.prompt for finished in coach.finished])
    for begin in range(0, PROMPTS, 5):
        with host_of(setup) as host:
            told += fed(host, coach.finished[begin : begin + 5])
            host.pause(0.1)
    with host_of(setup) as host:
        host.end({}, [], 0.1)
        told += fed(host, [])
    assert told == coach.said


def test_the_cases_see_what_they_are_about(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    said = embedded(host_config(tiny_pair, **DRIFTING), tmp_path / "run", PROMPTS).said
    assert [event for event in said if isinstance(event, Drifted) and event.acted_upon]
    assert [event for event in said if isinstance(event, Recalled)]
    assert len([event for event in said if isinstance(event, VersionPublished)]) >= 4


@pytest.fixture(scope="module")
def noted(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, NotedCoach]:  # noqa: F811
    """Of a stream whose log is committed by its updates alone."""
    config = host_config(tiny_pair, commit__seconds=1000.0)
    return config, embedded(config, tmp_path_factory.mktemp("embedded") / "run", PROMPTS)


def test_news_are_committed_before_they_are_handed_out(
    noted: tuple[Config, NotedCoach], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where the disk is slow."""
    config, coach = noted
    run = tmp_path / "run"
    reach = log_module.faults.reach
    monkeypatch.setattr(log_module.faults, "reach", lambda place: (time.sleep(0.1), reach(place)))
    handed = []
    with host_of(setup_of(config, run)) as host:
        assert host.news() is None, "what it began with is there already"
        for finished in coach.finished:
            host.completed(finished)
            if weights := host.news():
                handed.append(weights.drafter_version)
                known = table_of(partition_folder(run, LEARNER), "updates").to_pylist()
                assert weights.drafter_version in {0, *(row["drafter_version"] for row in known)}
                assert weights.head_version in {0, *(row["head_version"] for row in known)}
                assert host.news() is None, "once"
        host.pause(0.1)
    updates = [event.drafter_version for event in coach.said if isinstance(event, Updated) and event.served]
    assert set(handed) >= {version for version in updates if version} != set()


def test_news_are_what_learned(noted: tuple[Config, NotedCoach], tmp_path: Path):
    """The weights of the last update, which a host that goes on hands out again."""
    config, coach = noted
    setup, last = setup_of(config, tmp_path / "run"), None
    with host_of(setup) as host:
        first = [weight.clone() for weight in host._models.drafter.learning]
        for finished in coach.finished:
            host.completed(finished)
            last = host.news() or last
        host.pause(0.1)
    assert last is not None
    assert not all(map(torch.equal, first, last.drafter))
    with host_of(setup) as host:
        again = host.news()
    assert again is not None
    assert again.drafter_version == last.drafter_version > 0
    assert all(map(torch.equal, again.drafter, last.drafter))


def test_the_end_finishes_its_log_and_what_mlflow_is_told(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    config = host_config(tiny_pair, publish__enabled=True, publish__probe=False, publish__interval=4)
    coach = embedded(config, tmp_path / "embedded", 6)
    setup = setup_of(config, tmp_path / "run")
    with host_of(setup) as host:
        fed(host, coach.finished)
        assert host.end({"acceptance_rate": 0.5}, [], 0.1) > 0, f"nobody listens at {NOBODY}"
    folder = partition_folder(setup.run_folder, LEARNER)
    assert read_manifest(folder).finished
    spool = (folder / "registry-queue.jsonl").read_text(encoding="utf-8")
    assert '"finish"' in spool
    assert '"acceptance_rate"' in spool
    versions = table_of(folder, "versions").to_pylist()
    assert [row["version"] for row in versions] == list(range(len(versions)))
    for row in versions:
        assert open_version(setup.run_folder / row["folder"])["digest"] == row["digest"]
    with pytest.raises(RunError):
        host_of(setup)


def test_two_hosts_never_write_one_partition(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    setup = setup_of(host_config(tiny_pair), tmp_path / "run")
    with host_of(setup), pytest.raises(RunError, match="must not be written by two processes"):
        host_of(setup)


def test_what_it_was_told_after_its_last_commit_never_happened(noted: tuple[Config, NotedCoach], tmp_path: Path):
    """A host that dies leaves what it committed: another goes on from there."""
    config, coach = noted
    setup = setup_of(config, tmp_path / "run")
    with host_of(setup) as host:
        for finished in coach.finished[:5]:
            host.completed(finished)
            host.news()
        version = host._handed_out[0]
        host.completed(coach.finished[5])  # and no commit any more
    assert version > 0
    with host_of(setup) as host:
        assert host._coach.drafter_version == version
        known = table_of(partition_folder(setup.run_folder, LEARNER), "updates").to_pylist()
        assert max(row["drafter_version"] for row in known) == version
        host.pause(0.1)
