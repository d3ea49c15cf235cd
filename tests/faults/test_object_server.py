"""A server whose run is on an object store resumes elsewhere with its log, its learner and its versions."""

import shutil
from pathlib import Path

import pytest
from object_serving import ObjectServer
from serving_tiny import OFTEN, complete_all, serve_config, texts, wait_until
from tiny_pair import TinyPair

from pipeline.config.settings import Config
from pipeline.run.folder import open_run
from pipeline.serve.run import ServerRun
from store.object_store.mirror import fetch_logs
from store.query.log_reader import LogReader


def serve_requests(config: Config, place: str, prompts: list[str], *, resume: bool) -> None:
    """Run a server that learns from every prompt, then remove its folder from this machine."""
    folder, mirror = open_run(Path(place), new=not resume)
    with ServerRun(config, folder, lambda event: None, resume=resume, mirror=mirror) as server:
        assert all(answer.tokens for answer in complete_all(server.engine, prompts))
        wait_until(lambda: server.engine.read_status().learner_lag == 0)
    shutil.rmtree(folder)


@pytest.mark.sweep
def test_a_server_resumes_on_another_machine(
    tiny_pair: TinyPair, objects: ObjectServer, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))
    config = serve_config(tiny_pair, serve__learn="live", publish__enabled=True, publish__interval=2, **OFTEN)
    serve_requests(config, place, texts(0, 6), resume=False)
    serve_requests(config, place, texts(6, 12), resume=True)
    with LogReader([fetch_logs(place)]) as log:
        prompts = log.select('SELECT "offset", drafter_version FROM prompts ORDER BY 1').to_pylist()
        updates = log.select(
            "SELECT drafter_version FROM updates WHERE part = 'drafter' AND served ORDER BY seq"
        ).to_pylist()
        versions = log.select("SELECT version, reason FROM versions ORDER BY version").to_pylist()
        assert not log.check().mismatches.num_rows
    assert len({prompt["offset"] for prompt in prompts}) == len(prompts) == 12
    assert [version["version"] for version in versions] == list(range(len(versions)))
    assert [version["reason"] for version in versions].count("baseline") == 1, (
        "the resumed server continues the same run"
    )
    learned = [update["drafter_version"] for update in updates]
    assert learned == list(range(1, len(learned) + 1)), "the numbers of its updates continue"
    assert {prompt["drafter_version"] for prompt in prompts} <= {0, *learned}
