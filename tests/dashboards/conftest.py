"""The dashboards in a real browser. A page must print nothing on the console and send no request to another host."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from serving_runs import Serve, serve_dashboards


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that serves a folder of runs until the end of the test."""
    with ExitStack() as servers:
        yield lambda runs: servers.enter_context(serve_dashboards(runs))


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; `console_lines` has the output of its console, `urls` the addresses that it requested."""
    page = browser.new_page()
    page.set_default_timeout(15_000)
    page.console_lines, page.urls, page.dialogs = [], [], []
    page.on("console", lambda message: page.console_lines.append(message.text))
    page.on("pageerror", lambda error: page.console_lines.append(str(error)))
    page.on("request", lambda request: page.urls.append(request.url))
    page.on("dialog", lambda dialog: (page.dialogs.append(dialog.message), dialog.dismiss()))
    yield page
    lines, requests, dialogs = page.console_lines, page.urls, page.dialogs
    page.close()
    assert lines == []
    assert dialogs == []
    assert {url for url in requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:", "about:"))} == set()
