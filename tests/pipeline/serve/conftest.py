"""The processes of the engine and the learner are forked from one that has loaded the libraries already."""

import pytest


@pytest.fixture(autouse=True)
def _children_are_forked(forked: None) -> None:
    """See `forked`."""
