"""Forks the learner's process from a process that has loaded the libraries."""

import pytest
import warm_python

from pipeline.learner_service import process


@pytest.fixture(autouse=True)
def _learners_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "get_context", lambda method: warm_python.Context())
