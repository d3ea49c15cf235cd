"""Measured values are stored; those that cannot be stored or read are measured again."""

from pathlib import Path

import pytest
import torch

from stages.engine.forward_pass.measurements import Measurements


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def count_calls(values: list[int]):
    return lambda: values.pop(0)


def test_a_measurement_is_made_once_for_a_key(folder: Path):
    values = [1, 2, 3]
    found = [Measurements().get_or_measure("x", key, count_calls(values)) for key in ([1], [1], [2], [1])]
    assert found == [1, 1, 2, 1]
    assert Measurements().get_or_measure("y", [1], count_calls(values)) == 3
    assert len(list(folder.iterdir())) == 3, "and nothing else is left lying about"


def test_another_number_of_threads_is_another_measurement(folder: Path):
    before, values = torch.get_num_threads(), [1, 2]
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert Measurements().get_or_measure("x", [], count_calls(values)) == threads
    finally:
        torch.set_num_threads(before)


def test_with_a_damaged_file_the_value_is_measured_again(folder: Path):
    values = [1, 2]
    Measurements().get_or_measure("x", [], count_calls(values))
    next(folder.iterdir()).write_text("{", encoding="utf-8")
    assert Measurements().get_or_measure("x", [], count_calls(values)) == 2
    assert Measurements().get_or_measure("x", [], count_calls(values)) == 2


def test_a_run_believes_its_notes_before_anything_else(folder: Path):
    values = [1, 2, 3]
    Measurements().get_or_measure("x", [], count_calls(values))
    run = Measurements({})
    assert run.get_or_measure("x", [], count_calls(values)) == 1
    (name,) = run.recorded or {}
    resumed = Measurements({name: 7})
    assert resumed.get_or_measure("x", [], count_calls(values)) == 7
    assert resumed.get_or_measure("y", [], count_calls(values)) == 2
    assert len(resumed.recorded or {}) == 2
    assert Measurements().get_or_measure("x", [], count_calls(values)) == 1


def test_a_folder_that_cannot_be_written_is_no_obstacle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", "/dev/null/none")
    values = [1, 2]
    assert [Measurements().get_or_measure("x", [], count_calls(values)) for _ in range(2)] == [1, 2]
