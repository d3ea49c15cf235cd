"""The processes of the engine and the learner are forked from one that has loaded the libraries already."""

import pytest


@pytest.fixture(autouse=True)
def _children_are_forked(forked: None) -> None:
    """See `forked`."""


@pytest.fixture(scope="module")
def server(tiny_pair, tmp_path_factory):
    """One server for the tests of a file that check completions alone; nothing learns."""
    from serving_tiny import assert_sound, run_server, serve_config

    run = tmp_path_factory.mktemp("served") / "run"
    with run_server(serve_config(tiny_pair), run, keeps=True) as server:
        yield server
    assert_sound(run)
