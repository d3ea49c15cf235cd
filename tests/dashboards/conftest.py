"""The dashboards in a real browser. Every page must stay silent on the console and ask no host but its own."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from serving_runs import Serve, serve_dashboards

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a folder of runs until the test is over."""
    with ExitStack() as servers:
        yield lambda runs: servers.enter_context(serve_dashboards(runs))


@pytest.fixture(scope="module")  # while it is open, an event loop runs in this thread, and no other can
def browser() -> Iterator[Any]:
    """A window of headless Chromium; pages of one server share what it has loaded."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright, to drive a browser")
    if CHROMIUM is None:
        pytest.skip("the pages are tested in Chromium, which is not installed (Debian: apt install chromium)")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened.new_context(viewport={"width": 1400, "height": 950}, accept_downloads=True)
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; its `said` is what the console said, `asked` the addresses that it requested."""
    opened = browser.new_page()
    opened.set_default_timeout(15_000)
    opened.said, opened.asked, opened.dialogs = [], [], []
    opened.on("console", lambda message: opened.said.append(message.text))
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.on("request", lambda request: opened.asked.append(request.url))
    opened.on("dialog", lambda dialog: (opened.dialogs.append(dialog.message), dialog.dismiss()))
    yield opened
    said, asked, dialogs = opened.said, opened.asked, opened.dialogs
    opened.close()
    assert said == []
    assert dialogs == []
    assert {url for url in asked if not url.startswith(("http://127.0.0.1:", "data:", "blob:", "about:"))} == set()
