"""The tiny pair in the place of the built-in models, so that documents that name those run quickly."""

from pathlib import Path

import pytest
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.models import catalog


@pytest.fixture
def builtin_pair(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def path_of(name: str) -> Path:
        return tiny_pair.drafter if name == "drafter-1.6m" else tiny_pair.target

    monkeypatch.setattr(catalog, "path_of", path_of)
