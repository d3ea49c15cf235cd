"""The pictures of docs/dashboards.md, made from real runs: `python -m pytest -m sweep tests/dashboards`.

It takes some minutes, as the two runs are replayed first. OMNIDRAFT_RUNS names a folder that has them already, as
`learned` and `floor`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from serving_runs import serve_dashboards

from store.query.log_reader import LogReader

PICTURES = ROOT / "docs" / "images"
MOST_BYTES = 200_000

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real runs over the built-in prompts, with and without learning."""
    if "OMNIDRAFT_RUNS" in os.environ:
        return Path(os.environ["OMNIDRAFT_RUNS"])
    folder = tmp_path_factory.mktemp("real") / "runs"
    for name, more in (("learned", []), ("floor", ["--no-learn"])):
        program = "from pipeline.cli.app import main; main()"
        # Drafts of the same lengths, however busy this machine is.
        same = ["builtin:docs", "builtin:code", "--set", "draft.costs=estimated"]
        command = [sys.executable, "-c", program, "replay", "--run", str(folder / name), *same, *more]
        subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with serve_dashboards(runs) as found:
        yield found


def save(page: Any, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    picture = PICTURES / f"dashboard-{name}.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size < MOST_BYTES


def test_the_runs(address: str, page: Any):
    page.set_viewport_size({"width": 1280, "height": 420})
    page.goto(address)
    page.wait_for_selector("#runs tbody tr")
    save(page, "runs")


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/stream", "/policies", "/text", "/memory", "/ngrams", "/calibration", "/vocabulary", "/versions"),
        "/sql?recipe=drifts",
    ],
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(address: str, page: Any, path: str, scheme: Any):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}{path}")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(1000)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    if (path, scheme) == ("/stream", "dark"):
        save(page, "phone")


def test_the_stream(address: str, page: Any):
    page.set_viewport_size({"width": 1280, "height": 1150})
    page.goto(f"{address}/stream?run=learned&run=floor")
    page.wait_for_selector("#chart .scatterlayer .trace")
    assert "drift at" in page.inner_text("#events")
    save(page, "stream")


def test_the_text(address: str, runs: Path, page: Any):
    with LogReader([runs / "learned"]) as log:  # one with something of every kind
        query = """
            SELECT "offset" FROM decisions GROUP BY 1
            ORDER BY count(*) FILTER (translation = 'ngram' AND outcome = 'accepted') > 0 DESC,
                count(*) FILTER (outcome = 'rejected') > 3 DESC, count(*) FILTER (drafter = 'model') DESC LIMIT 1
        """
        offset = log.select(query).to_pylist()[0]["offset"]
    page.set_viewport_size({"width": 1240, "height": 800})
    page.goto(f"{address}/text?run=learned&offset={offset}")
    page.wait_for_selector("#prompts [aria-current]")
    page.hover(".tokens .accepted.ngram >> nth=0")
    assert "n-gram" in page.inner_text("#detail")
    save(page, "text")


def test_the_ngrams(address: str, page: Any):
    page.set_viewport_size({"width": 1280, "height": 1290})
    page.goto(f"{address}/ngrams?run=learned")
    page.wait_for_selector("#lengths .barlayer .trace")
    assert page.locator("#paying tbody tr").count() > 3
    save(page, "ngrams")


def test_the_versions(address: str, page: Any):
    page.set_viewport_size({"width": 1280, "height": 1180})
    page.goto(f"{address}/versions?run=learned")
    page.wait_for_selector("#probe .scatterlayer .trace")
    page.wait_for_selector("#bars .barlayer .trace")
    assert page.locator("#all tbody tr").count() > 5
    save(page, "versions")


def test_the_sql(address: str, page: Any):
    page.set_viewport_size({"width": 1280, "height": 860})
    page.goto(f"{address}/sql?run=learned&run=floor&recipe=acceptance-by-dataset")
    page.wait_for_selector("#rows tbody tr")
    page.click(".views summary >> nth=3")
    save(page, "sql")
