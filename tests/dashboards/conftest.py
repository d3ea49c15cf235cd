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
    """A page; `console_lines` is what the console printed, `urls` the addresses that it requested."""
    opened = browser.new_page()
    opened.set_default_timeout(15_000)
    opened.console_lines, opened.urls, opened.dialogs = [], [], []
    opened.on("console", lambda message: opened.console_lines.append(message.text))
    opened.on("pageerror", lambda error: opened.console_lines.append(str(error)))
    opened.on("request", lambda request: opened.urls.append(request.url))
    opened.on("dialog", lambda dialog: (opened.dialogs.append(dialog.message), dialog.dismiss()))
    yield opened
    lines, requests, dialogs = opened.console_lines, opened.urls, opened.dialogs
    opened.close()
    assert lines == []
    assert dialogs == []
    assert {url for url in requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:", "about:"))} == set()
