"""A drafter that is named by an alias is pinned to the version that the alias means when the run begins."""

from types import SimpleNamespace

import pytest

from pipeline.assembly import models as build_models
from store.errors import ModelError


@pytest.fixture(autouse=True)
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [SimpleNamespace(number=1, aliases=()), SimpleNamespace(number=7, aliases=("champion", "candidate"))]
    monkeypatch.setattr("store.registry.registry.list_versions", lambda uri, name: versions)


@pytest.mark.parametrize(
    ("name", "pinned"),
    [
        ("models:/drafter@champion", "models:/drafter/7"),
        ("models:/drafter/1", "models:/drafter/1"),
        ("builtin:drafter-1.6m", "builtin:drafter-1.6m"),
        ("owner/name", "owner/name"),
    ],
)
def test_an_alias_becomes_a_number_and_other_names_stay(name: str, pinned: str):
    assert build_models.pin_version(name, "uri") == pinned


def test_an_alias_that_no_version_has_is_refused_with_those_that_there_are():
    with pytest.raises(ModelError, match="champion"):
        build_models.pin_version("models:/drafter@best", "uri")
