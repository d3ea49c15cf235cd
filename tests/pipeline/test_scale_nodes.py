"""Several machines, by Ray's own test cluster: they come and go while a run goes on."""

from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray.cluster_utils import Cluster
from replaying import config_of
from scaling import Notes, assert_whole, embedded_texts, many_prompts, owner_of, scaled
from tiny_pair import TinyPair, tiny_pair  # noqa: F401

from store.partitions import worker_folders

PROMPTS = 40
HEAD = {"num_cpus": 0, "include_dashboard": False}


@pytest.mark.timeout(600)
def test_machines_come_and_go(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    """Three workers on machines with room for one each: one machine goes, which takes what runs there with it, and two
    come, so that the worker that never had a place begins too."""
    prompts = many_prompts(tmp_path, PROMPTS)
    often = {"commit__seconds": 0.2, "commit__share": 1.0}
    config = config_of(tiny_pair, sources=(str(prompts),), sampling__max_new_tokens=48, **often)
    texts = embedded_texts(config, tmp_path / "embedded")
    cluster, run = Cluster(initialize_head=True, head_node_args=HEAD), tmp_path / "run"
    first = cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    began: list[str] = []

    def change() -> None:
        began.extend(folder.name for folder in worker_folders(run) if owner_of(folder))
        cluster.remove_node(first, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1)

    try:
        _, notes = scaled(config, run, cluster.address, 3, notes=Notes(change, after=6))
    finally:
        cluster.shutdown()
    assert_whole(run, texts)
    assert 1 <= len(began) <= 2
    gone = [note for note in notes.told if note.startswith("worker") and "is gone" in note]
    assert gone
    assert len(worker_folders(run)) == 3 + len(gone)
