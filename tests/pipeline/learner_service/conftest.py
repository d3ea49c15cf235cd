"""Forks the learner's process from a process that has loaded the libraries."""

import pytest


@pytest.fixture(autouse=True)
def _children_are_forked(forked: None) -> None:
    """See `forked`."""
