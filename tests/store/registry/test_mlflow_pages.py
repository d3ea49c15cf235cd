"""MLflow's own pages show real runs, checked in headless Chromium.

OMNIDRAFT_PICTURES=docs/images renews the screenshots of docs/versions.md.
"""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image
from places import ROOT
from serving import HOST, free_port, wait_until_up

from store.registry.mlflow_client import connect
from store.registry.mlflow_pages import list_pages
from store.registry.registry import default_uri, find_only_model, list_versions, promote

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
NO_PANEL = """
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
"""
MODE = "workflowType=machine_learning"  # MLflow's default mode hides registered models

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replays with different settings, and one that starts from the best version of them."""
    if "OMNIDRAFT_RUNS" in os.environ:
        return Path(os.environ["OMNIDRAFT_RUNS"])
    folder = tmp_path_factory.mktemp("runs")
    replay(folder, "monday")
    replay(folder, "tuesday", "--set", "learn.method=gradient", "--set", "learn.interval=8")
    best = max(list_versions(default_uri(folder)), key=lambda version: version.probe or 0.0)
    promote(default_uri(folder), best.name, best.number)
    replay(folder, "wednesday", "--drafter", f"models:/{best.name}@champion")
    return folder


def replay(runs: Path, name: str, *options: str) -> None:
    program = "from pipeline.cli.app import main; main()"
    size = ["builtin:docs", "builtin:code", "--limit", "100", "--max-new-tokens", "40", "--run", str(runs / name)]
    size += ["--draft-sources", "model"]  # so that the model drafts and learns, however good copies are
    subprocess.run(
        [sys.executable, "-c", program, "replay", *size, *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )


@contextmanager
def pages_over(runs: Path) -> Iterator[str]:
    port = free_port()
    store = ["--backend-store-uri", default_uri(runs), "--default-artifact-root", (runs / "mlartifacts").as_uri()]
    command = [sys.executable, "-m", "mlflow", "ui", *store, "--host", HOST, "--port", str(port), "--workers", "1"]
    server = subprocess.Popen(
        command, env=os.environ | QUIET, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until_up(f"http://{HOST}:{port}/health", server)
        yield f"http://{HOST}:{port}/#"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[str]:
    with pages_over(runs) as address:
        yield address


@pytest.fixture(scope="module")
def page(browser: Any) -> Any:
    browser.add_init_script(NO_PANEL)
    page = browser.new_page()
    page.set_default_timeout(60_000)
    return page


def save_screenshot(page: Any, name: str) -> None:
    """Save a picture that a document shows, if their folder is set."""
    path = Path(os.environ.get("OMNIDRAFT_PICTURES", "")) / f"mlflow-{name}.png"
    if path.exists():
        page.wait_for_timeout(2500)  # charts and tables move into place
        for place in page.get_by_text("Path: file:").all():
            place.evaluate("shown => shown.style.visibility = 'hidden'")  # a path of this machine
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        few = image.quantize(256, kmeans=4, dither=Image.Dither.NONE)
        few.save(path, optimize=True)


def replays(runs: Path) -> dict[str, Any]:
    client = connect(default_uri(runs))
    experiment = client.get_experiment_by_name("omnidraft").experiment_id
    return {run.info.run_name: run.info for run in client.search_runs([experiment], "tags.kind = 'replay'")}


def test_one_page_has_the_curves_of_all_runs(runs: Path, server: str, page: Any):
    page.goto(f"{server}/{list_pages(default_uri(runs))['curves']}")
    page.get_by_text("versions/acceptance").first.wait_for()
    for name in ("monday", "tuesday", "wednesday"):
        assert page.get_by_role("link", name=name, exact=True).count() == 1
    assert page.get_by_text("3 matching runs").count() == 1, "versions and comparisons are not listed"
    save_screenshot(page, "runs")


def test_a_run_shows_its_drifts_and_its_tokens(runs: Path, server: str, page: Any):
    run = replays(runs)["monday"]
    page.goto(f"{server}/experiments/{run.experiment_id}/runs/{run.run_id}/artifacts/acceptance.png?{MODE}")
    page.locator("img[src*='acceptance.png'], img[src^='blob:']").first.wait_for()
    page.goto(f"{server}/experiments/{run.experiment_id}/runs/{run.run_id}/artifacts/tokens.html?{MODE}")
    page.reload()  # the page reads only once which file to show
    page.frame_locator("iframe").first.locator(".accepted").first.wait_for()


def test_the_printed_addresses_open_their_pages(runs: Path, server: str, page: Any):
    """The table of runs has the configured columns and no versions."""
    pages = list_pages(default_uri(runs))
    page.set_viewport_size({"width": 1800, "height": 700})
    page.goto(f"{server}/{pages['runs']}")
    page.get_by_text("tokens_per_second").first.wait_for()
    for column in ("target", "drafter", "tokens_per_second", "acceptance_rate", "drifts", "version"):
        assert page.get_by_text(column, exact=True).count() >= 1, column
    assert page.get_by_role("link", name="monday", exact=True).count() == 1
    assert page.get_by_text("monday v2", exact=True).count() == 0
    save_screenshot(page, "table")


def test_the_table_of_versions_shows_their_lineage_and_acceptance(runs: Path, server: str, page: Any):
    page.set_viewport_size({"width": 1500, "height": 1100})
    page.goto(f"{server}/models/{find_only_model(default_uri(runs))}?{MODE}")
    page.get_by_text("probe").first.wait_for()
    for tag in ("run", "reason", "changes", "probe"):
        assert page.get_by_text(tag, exact=True).count() >= 1
    assert page.get_by_text("about", exact=True).count() == 0
    assert page.get_by_text("@ champion").count() == page.get_by_text("@ candidate").count() == 1
    save_screenshot(page, "versions")


def test_versions_of_different_runs_are_compared_on_the_probe(runs: Path, server: str, page: Any):
    name = find_only_model(default_uri(runs))
    newest = {version.run: version for version in reversed(list_versions(default_uri(runs)))}
    client = connect(default_uri(runs))
    ids = {str(one.number): client.get_model_version(name, str(one.number)).run_id for one in newest.values()}
    page.set_viewport_size({"width": 1400, "height": 1300})
    page.goto(f"{server}/compare-model-versions?name={quote(json.dumps(name))}&runs={quote(json.dumps(ids))}&{MODE}")
    page.get_by_text("tokens_per_pass").first.wait_for()
    for version in newest.values():
        assert page.get_by_text(f"{version.run} v{version.version}", exact=True).count() == 1
    save_screenshot(page, "compare-versions")
