"""The pages on real runs, and the pictures of docs/dashboards.md: `python -m pytest -m sweep tests/dashboards`.

This takes some minutes, because the runs are replayed first: two runs of the built-in pair, with different versions
and n-grams, and two default runs. OMNIDRAFT_RUNS names a folder that has them already, as `learned` and `baseline`:
the first two in `builtin`, the others in `default`.
"""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from places import ROOT
from real_models import needs_smollm2, put_smollm2_into_cache
from serving_runs import serve_dashboards

from store.query.log_reader import LogReader

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 200_000
# Settings with which drafts have the same lengths however busy this machine is.
PAIR = ("builtin:docs", "builtin:code", "--draft-sources", "model", "--set", "draft.costs=estimated")
PAGES = ("/", "/stream", "/policies", "/text", "/memory", "/ngrams", "/calibration", "/vocabulary", "/versions")

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1800)]


def make_runs(folder: Path, *command: str) -> Path:
    """Replay with and without learning, unless OMNIDRAFT_RUNS names a folder of such runs."""
    if "OMNIDRAFT_RUNS" in os.environ:
        return Path(os.environ["OMNIDRAFT_RUNS"]) / folder.name
    for name, more in (("learned", []), ("baseline", ["--no-learn"])):
        program = "from pipeline.cli.app import main; main()"
        replay = [sys.executable, "-c", program, "replay", "--run", str(folder / name), *command, *more]
        subprocess.run(replay, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real runs over the built-in prompts, with and without learning."""
    return make_runs(tmp_path_factory.mktemp("real") / "builtin", *PAIR)


@pytest.fixture(scope="module")
def default_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two default runs of SmolLM2, with and without learning."""
    put_smollm2_into_cache()
    return make_runs(tmp_path_factory.mktemp("real") / "default")


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with serve_dashboards(runs) as found:
        yield found


@pytest.fixture(scope="module")
def default_address(default_runs: Path) -> Iterator[str]:
    with serve_dashboards(default_runs) as found:
        yield found


def save(name: str, screenshot: bytes) -> None:
    """Save a picture that a document shows, in 256 colours."""
    path = IMAGES / f"dashboard-{name}.png"
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    image.quantize(256, kmeans=4, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("path", [*PAGES, "/sql?recipe=drifts"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_no_page_is_wider_than_its_window(address: str, page: Any, path: str, scheme: Any, width: int):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(f"{address}{path}")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(1000)
    assert page.evaluate("document.documentElement.scrollWidth") == width


@needs_smollm2
def test_the_stream(default_address: str, page: Any):
    page.set_viewport_size({"width": 1280, "height": 1350})
    page.goto(f"{default_address}/stream?run=learned")
    page.wait_for_selector("#chart .scatterlayer .trace")
    assert "drift at" in page.inner_text("#events")
    page.wait_for_timeout(500)
    save("stream", page.screenshot())


@needs_smollm2
def test_the_policies(default_address: str, page: Any):
    page.set_viewport_size({"width": 1280, "height": 860})
    page.goto(f"{default_address}/policies?run=learned")
    page.wait_for_selector("#chart .barlayer .trace, #chart .scatterlayer .trace")
    assert page.locator("#policies tbody tr").count() > 2
    page.wait_for_timeout(500)
    save("policies", page.screenshot())


@needs_smollm2
def test_the_text(default_address: str, default_runs: Path, page: Any):
    with LogReader([default_runs / "learned"]) as log:  # a prompt with as many kinds of tokens as possible
        query = """
            SELECT "offset" FROM decisions GROUP BY 1
            ORDER BY count(DISTINCT drafter) FILTER (outcome = 'accepted') DESC,
                count(*) FILTER (outcome = 'rejected') > 3 DESC, count(*) FILTER (drafter = 'model') DESC LIMIT 1
        """
        offset = log.select(query).to_pylist()[0]["offset"]
    page.set_viewport_size({"width": 1240, "height": 800})
    page.goto(f"{default_address}/text?run=learned&offset={offset}")
    page.wait_for_selector("#prompts [aria-current]")
    page.hover(".tokens .accepted >> nth=0")
    assert "accepted" in page.inner_text("#detail")
    save("text", page.screenshot())


def test_the_versions(address: str, page: Any):
    page.set_viewport_size({"width": 1280, "height": 1290})
    page.goto(f"{address}/versions?run=learned")
    page.wait_for_selector("#probe .scatterlayer .trace")
    assert page.locator("#all tbody tr").count() > 5
    page.wait_for_timeout(3000)  # until the numbers of the registry are loaded
    save("versions", page.screenshot())
