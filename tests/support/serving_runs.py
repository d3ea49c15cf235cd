"""Dashboards over a folder of runs, served by a thread of the test."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

REQUIRED_PACKAGES = ("fastapi", "uvicorn", "plotly")
Serve = Callable[[Path], str]


@contextmanager
def serve_dashboards(runs: Path) -> Iterator[str]:
    """Serve dashboards over some runs on a thread and yield their address."""
    if missing := [name for name in REQUIRED_PACKAGES if find_spec(name) is None]:
        pytest.skip(f"the dashboards need {', '.join(missing)}: install omnidraft again")
    import uvicorn

    from dashboards.web.app import create_app
    from store.hosts import listen

    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(None, runs), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server must start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()


def read_table(page: Any, place: str) -> list[list[str]]:
    """Wait for a table on a page. Returns the texts of its cells, row by row."""
    page.wait_for_selector(f"{place} tbody tr", state="attached")
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    cells: list[list[str]] = page.eval_on_selector_all(f"{place} tbody tr", script)
    return cells
