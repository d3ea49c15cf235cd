"""Being here puts this folder on the import path, so that every test can `import doubles`."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from loopback import LoopbackBroker

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the user's cache; what one test reads of a tokenizer serves the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "omnidraft-cache"))
        yield


@pytest.fixture(scope="session")
def kafka_broker() -> LoopbackBroker:
    """A broker that speaks Kafka's protocol on loopback."""
    pytest.importorskip("confluent_kafka", reason="needs the extra 'kafka'")
    return LoopbackBroker()


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray on two cores of this machine with an object store of 80 MB; the folder that it would spill into."""
    ray = pytest.importorskip("ray", reason="needs the extra 'ray'")
    folder = tmp_path_factory.mktemp("spill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",
            num_cpus=2,
            object_store_memory=80_000_000,
            object_spilling_directory=str(folder),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield folder
        ray.shutdown()
