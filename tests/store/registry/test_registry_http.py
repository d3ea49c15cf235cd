"""A run is sent over HTTP: real servers on loopback that store the artifacts and fail for some time."""

from pathlib import Path

import pytest
from event_making import make_completed
from registry_making import LittleRun, check_files, new_store, play, read_store, sync_until_sent
from serving import Proxy, mlflow_server, postgres

from store.registry.mlflow_client import connect
from store.registry.mlflow_sync import RunSync
from store.registry.registry import default_uri

MOODS = ("moody", "broken", "slow", "mute")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a run leaves in a store on the disk, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("expected")
    *_, run = play(folder / "run-a")
    run.sync(new_store(folder))
    return read_store(default_uri(folder))


@pytest.mark.slow
def test_a_server_stores_the_same_as_a_local_store(tmp_path: Path, expected: dict, capfd: pytest.CaptureFixture[str]):
    with mlflow_server(tmp_path) as server:
        capfd.readouterr()
        *_, run = play(tmp_path / "run-a")
        assert run.sync(server).versions == 2
        assert capfd.readouterr() == ("", "")
        check_files(server, run.folder)
        assert read_store(server) == expected
        long = LittleRun(tmp_path / "long")
        long.commit(*map(make_completed, range(400)))  # more points than a request takes
        assert long.sync(server).points == 3600
        (found,) = connect(server).search_runs(["1"], "attributes.run_name = 'long'")
        assert len(connect(server).get_metric_history(found.info.run_id, "window/acceptance_rate")) == 400


@pytest.mark.sweep
@pytest.mark.parametrize("mood", MOODS)
def test_a_failing_server_costs_time_and_nothing_else(tmp_path: Path, expected: dict, mood: str):
    with mlflow_server(tmp_path) as server:
        send_through_proxy(tmp_path / "run-a", server, mood)
        check_files(server, tmp_path / "run-a")
        assert read_store(server) == expected


@pytest.mark.sweep
def test_postgresql_stores_the_same(tmp_path: Path, expected: dict):
    with postgres() as store, mlflow_server(tmp_path, store) as server:
        send_through_proxy(tmp_path / "run-a", server, "moody")
        check_files(server, tmp_path / "run-a")
        assert read_store(server) == expected


def send_through_proxy(folder: Path, server: str, mood: str) -> None:
    """Send the commits of a run, of which those in the middle meet a server in a mood."""
    proxy = Proxy(server)
    for number, run in enumerate(play(folder)):
        proxy.mood = mood if number in (1, 2, 3) else "well"
        if number in (0, 4):
            sync_until_sent(folder, proxy.uri)
            continue
        try:
            RunSync(run.folder, proxy.uri).update(stopped=False)
        except Exception:
            assert mood != "slow"
    proxy.close()
