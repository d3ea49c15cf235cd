"""Fixtures for all tests, and how tests are shared out. `tests/support` is on the import path, so that every test can
`import doubles`.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # in front of torch: every core has a process of tests for itself
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a thread per tiny tensor waits for its turn on a busy machine
os.environ["MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR"] = "0"  # seconds between attempts to reach an MLflow that is not there
os.environ["MLFLOW_HTTP_REQUEST_BACKOFF_JITTER"] = "0"
os.environ.pop("COLUMNS", None)  # readline sets it for the processes of tests, and tables would be as narrow as that

import gc
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compiled_code
import mlflow_tables
import pytest
import warm_python
from constants import ALWAYS, constants
from hypothesis import settings
from loopback import LoopbackBroker

if TYPE_CHECKING:
    from published_pair import Published
    from replaying import Command
    from tiny_pair import TinyPair, TinyTrio

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")

LONGEST = (  # files that take longest begin first, so that no process is left with one at the end
    "pipeline/cluster/test_ray_backend.py",
    "stages/vocabulary/",  # needs nothing that another process compiles meanwhile
    "faults/test_object_runs.py",
    "faults/test_kills.py",
    "pipeline/versions/test_export.py",
    "pipeline/run/test_resume.py",
    "real/",
    "stages/engine/compiled/",
    "stages/engine/models/test_mapped.py",
    "stages/engine/checkpoints/test_size_check.py",
    "store/registry/",
    "stages/ngrams/test_ngram_cache.py",
    "exactness/",
    "faults/",
    "pipeline/cli/",
    "pipeline/serve/",
    "pipeline/cluster/",
    "pipeline/assembly/",
    "pipeline/learner_service/",
    "pipeline/run/",
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Files of these names are handed out as one, so that one process makes what they share: a cluster, finished runs.
TOGETHER = {
    "cluster/test_ray_backend.py": "ray",
    "sources/test_ray_data.py": "ray",
    "contract/test_source_contract.py": "ray",
    "tests/faults/": "faults",
    "tests/golden/": "golden",
}


gc.set_threshold(700, 10, 200)  # a look at all objects of all libraries takes half a second: rarely


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: a process of tests per core; none beside this one for a single file."""
    one = len(config.args) == 1 and config.args[0].partition("::")[0].endswith(".py")
    return 0 if one else min(len(os.sched_getaffinity(0)), 8)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out files one by one, but some together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((group for part, group in TOGETHER.items() if part in file), file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first. xdist hands out files in this order. Of tests with representatives, the other cases are marked
    sweep, unless tests are named on the command line.
    """
    if not any("::" in argument for argument in config.args):
        mark_all_but_representatives(items)
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(tests).as_posix()
        return next((place for place, begin in enumerate(LONGEST) if path.startswith(begin)), len(LONGEST))

    items.sort(key=place)


def mark_all_but_representatives(items: list[pytest.Item]) -> None:
    """`@pytest.mark.representatives(3)`: three cases run always, the first and others at even distances;
    `representatives("lru", "lfu")`: those with these ids.
    """
    cases: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("representatives") is not None and hasattr(item, "callspec"):
            cases[item.path, item.originalname].append(item)
    for (_, name), all_of_it in cases.items():
        chosen = all_of_it[0].get_closest_marker("representatives").args
        ids = [item.callspec.id for item in all_of_it]
        if isinstance(chosen[0], int):
            kept = {ids[place * len(ids) // chosen[0]] for place in range(chosen[0])}
        else:
            kept = set(chosen)
        if not kept <= set(ids):
            raise pytest.UsageError(f"{name} must have the cases {sorted(kept)}; it has {ids}")
        for item in all_of_it:
            if item.callspec.id not in kept:
                item.add_marker(pytest.mark.sweep)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the user's cache or waits for the disk; what one reads or compiles serves the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # processes are killed, but no power fails (power_loss.py)
        cache = shared_folder(tmp_path_factory) / "omnidraft-cache"
        patch.setenv("OMNIDRAFT_CACHE", str(cache))
        compiled_code.keep_compiled(pytestconfig, cache)
        if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":  # meanwhile the others test what needs none of it (LONGEST)
            compiled_code.compile_all()
        patch.setenv(mlflow_tables.VARIABLE, str(shared_folder(tmp_path_factory) / "mlflow-tables.db"))
        yield
        compiled_code.store_compiled(cache)


@pytest.fixture
def small_heap() -> Iterator[None]:
    """`gc.collect` looks at what a test makes, and at nothing of what a million objects of libraries refer to."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _constants_of_all_tests() -> Iterator[None]:
    with constants(**ALWAYS):
        yield


@pytest.fixture(autouse=True)
def _constants(request: pytest.FixtureRequest) -> Iterator[None]:
    """The values of the marker `constants`."""
    values: dict[str, object] = {}
    for marker in request.node.iter_markers("constants"):
        values = marker.kwargs | values  # the nearest marker comes first
    with constants(**values):
        yield


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session for all of its processes of tests."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True)
def _mlflow_tables_are_copied() -> None:
    mlflow_tables.copy_tables()  # nothing before MLflow is loaded, which a test may do for all that follow


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> "TinyPair":
    """Tiny models, made once for all processes of tests."""
    from tiny_pair import make_pair  # which takes seconds to import, as those below

    return make_pair(shared_folder(tmp_path_factory) / "tiny-pair")


@pytest.fixture(scope="session")
def tiny_trio(tmp_path_factory: pytest.TempPathFactory) -> "TinyTrio":
    from tiny_pair import make_trio

    return make_trio(shared_folder(tmp_path_factory) / "tiny-pair")


@pytest.fixture
def builtin_pair(tiny_pair: "TinyPair", monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny pair in the place of the built-in models, so that documents that name those run quickly."""
    paths = {"drafter-1.6m": tiny_pair.drafter}
    monkeypatch.setattr("pipeline.models.catalog.path_of", lambda name: paths.get(name, tiny_pair.target))


@pytest.fixture(scope="session")
def published(tiny_pair: "TinyPair", tmp_path_factory: pytest.TempPathFactory) -> "Published":
    from published_pair import publish

    return publish(tiny_pair, tmp_path_factory.getbasetemp() / "published")


@pytest.fixture
def omnidraft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Command":
    """`omnidraft`, typed in this process."""
    from replaying import Command

    return Command(monkeypatch, capsys)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test, or the code that it tests, starts by `[sys.executable, ...]` has its libraries loaded."""
    monkeypatch.setattr("subprocess.Popen", warm_python.Popen)


@pytest.fixture(scope="session")
def kafka_broker() -> LoopbackBroker:
    """A broker that speaks Kafka's protocol on loopback."""
    pytest.importorskip("confluent_kafka", reason="needs the extra 'kafka'")
    return LoopbackBroker()


@pytest.fixture(scope="session")
def spill_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ray writes there what its object store cannot hold."""
    return tmp_path_factory.mktemp("spill")


@pytest.fixture(scope="session")
def ray_address(spill_folder: Path) -> Iterator[str]:
    """A Ray cluster of this machine with an object store of 80 MB, for all files that use Ray."""
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80_000_000, "include_dashboard": False}
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")  # workers have Ray's environment
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_USAGE_STATS_ENABLED": "0", **keys}.items():
            patch.setenv(name, value)
        with warm_python.ray_workers():
            head["object_spilling_directory"] = str(spill_folder)
            cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def ray_cluster(ray_address: str) -> Iterator[None]:
    """Ray, connected to the cluster."""
    import ray

    ray.init(ray_address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")  # its event loop occupies this thread while it is open
def browser() -> Iterator[Any]:
    """A window of headless Chromium; pages of one server share its cache."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright, to drive a browser")
    if CHROMIUM is None:
        pytest.skip("the pages are tested in Chromium, which is not installed (Debian: apt install chromium)")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium.new_context(viewport={"width": 1400, "height": 950}, accept_downloads=True)
        chromium.close()
