"""What is reported while a model loads: the share of its layers, and how long the others take."""

import logging
from collections.abc import Callable

import pytest
from tiny_pair import TinyPair

from stages.engine.checkpoints import loading
from stages.engine.checkpoints.loading import report_layers
from stages.engine.forward_pass import packed_weights
from stages.engine.forward_pass.measurements import Measurements
from stages.engine.models.language_model import load_model

Texts = Callable[..., list[str]]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Texts:
    """Loads four layers that take so many seconds each, and returns the messages."""

    def load(seconds: float, source: str = "models/large.gguf") -> list[str]:
        now = [100.0]
        monkeypatch.setattr(loading, "monotonic", lambda: now[0])
        with caplog.at_level(logging.INFO, "omnidraft"):
            for _ in report_layers(source, "wxyz"):
                now[0] += seconds
        return [record.getMessage() for record in caplog.records]

    return load


def test_the_share_and_the_time_left_are_reported(texts: Texts):
    reports = ["loading large: 25%, 9 s left", "loading large: 50%, 6 s left", "loading large: 75%, 3 s left"]
    assert texts(3.0) == [*reports, "checking large", "loaded large in 12 s"]


def test_reports_are_a_second_apart(texts: Texts):
    assert texts(0.6, "a/folder-1.5b/") == [
        "loading folder-1.5b: 50%, 1 s left",
        "checking folder-1.5b",
        "loaded folder-1.5b in 2 s",
    ]


def test_what_loads_in_a_moment_is_not_reported(texts: Texts):
    assert texts(0.2) == []


def test_weights_are_prepared_once_while_a_model_is_loaded(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch):
    prepared, measurements = list[str](), Measurements({})
    monkeypatch.setattr(packed_weights, "report_layers", lambda source, layers: prepared.append(source) or layers)
    for number in (1, 2):  # the second proof is known
        model = load_model(str(tiny_pair.target), "float32", "cpu", measurements=measurements)
        model.prove_forward()
        assert prepared == [str(tiny_pair.target)] * number
        model.forward_pass.reserve(1, 8)
    assert len(prepared) == 2
