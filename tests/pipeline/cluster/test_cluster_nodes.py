"""Several machines, by Ray's own test cluster: they are added and removed during a run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_python

pytest.importorskip("ray")

from ray.cluster_utils import Cluster
from replaying import config_of
from scaling import RecordingDisplay, assert_whole, find_owner, many_prompts, replay_on_cluster, replay_texts
from tiny_pair import TinyPair

from store.log.partitions import worker_folders

PROMPTS = 40
HEAD = {"num_cpus": 0, "include_dashboard": False}


@pytest.fixture(autouse=True)
def _workers_are_forked() -> Iterator[None]:
    with warm_python.ray_workers():
        yield


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_machines_come_and_go(tiny_pair: TinyPair, tmp_path: Path):
    """Three workers on two machines with one CPU each: one machine is removed with its worker, and two are added, so
    that the third worker can start too.
    """
    prompts = many_prompts(tmp_path, PROMPTS)
    often = {"commit__seconds": 0.2}
    config = config_of(tiny_pair, sources=(str(prompts),), sampling__max_new_tokens=48, **often)
    texts = replay_texts(config, tmp_path / "embedded")
    cluster, run = Cluster(initialize_head=True, head_node_args=HEAD), tmp_path / "run"
    first = cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    began: list[str] = []

    def change() -> None:
        began.extend(folder.name for folder in worker_folders(run) if find_owner(folder))
        cluster.remove_node(first, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1)

    try:
        _, display = replay_on_cluster(config, run, cluster.address, 3, display=RecordingDisplay(change, after=6))
    finally:
        cluster.shutdown()
    assert_whole(run, texts)
    assert 1 <= len(began) <= 2
    lost = [note for note in display.notes if note.startswith("worker") and "is lost" in note]
    assert lost
    assert len(worker_folders(run)) == 3 + len(lost)
