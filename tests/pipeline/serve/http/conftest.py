"""A server over a scripted engine, and the official client of it; imported when a test wants them."""

import pytest


@pytest.fixture(scope="module")
def engine():
    from serving_doubles import ScriptedEngine

    return ScriptedEngine()


@pytest.fixture(scope="module")
def client(engine):
    from serving_doubles import run_http_server

    with run_http_server(engine) as served:
        yield served.client()
