"""Settings that choose by name: their names are those of the tables that make what is chosen."""

from collections.abc import Collection
from typing import get_args

import pytest

from pipeline.config.settings import settings
from pipeline.learning.drift import make_detector
from stages.learn.examples.losses import LOSSES
from stages.ngrams.cache import RANKS
from stages.verification.rules import MODES


def names_of(key: str) -> list[str]:
    return list(get_args(settings()[key].annotation))


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("draft.mode", MODES),
        ("learn.loss", LOSSES),
        ("cache.policy", [*RANKS, "unbounded", "off"]),
    ],
)
def test_a_setting_names_what_its_table_has(key: str, table: Collection[str]):
    assert sorted(names_of(key)) == sorted(table)


def test_every_detector_is_another():
    names = names_of("drift.detector")
    made = {type(make_detector(name)).__name__ for name in names}
    assert made == {"PageHinkley", "NoDrift"}
    assert len(names) == len(made)
