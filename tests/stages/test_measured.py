"""What was measured is kept; what cannot be kept or read is measured anew."""

from pathlib import Path

import pytest
import torch

from stages.measured import note_in, remembered


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))
    note_in(None)  # another test's run may have left its notebook
    return tmp_path / "cache"


def counted(values: list[int]):
    return lambda: values.pop(0)


def test_a_measurement_is_made_once_for_a_key(folder: Path):
    values = [1, 2, 3]
    found = [remembered("x", key, counted(values)) for key in ([1], [1], [2], [1])]
    assert found == [1, 1, 2, 1]
    assert remembered("y", [1], counted(values)) == 3
    assert len(list(folder.iterdir())) == 3, "and nothing else is left lying about"


def test_another_number_of_threads_is_another_measurement(folder: Path):
    before, values = torch.get_num_threads(), [1, 2]
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert remembered("x", [], counted(values)) == threads
    finally:
        torch.set_num_threads(before)


def test_a_damaged_file_is_measured_anew(folder: Path):
    values = [1, 2]
    remembered("x", [], counted(values))
    next(folder.iterdir()).write_text("{", encoding="utf-8")
    assert remembered("x", [], counted(values)) == 2
    assert remembered("x", [], counted(values)) == 2


def test_a_run_believes_its_notebook_before_anything_else(folder: Path):
    values = [1, 2, 3]
    remembered("x", [], counted(values))
    notebook: dict[str, object] = {}
    note_in(notebook)
    assert remembered("x", [], counted(values)) == 1
    (name,) = notebook
    notebook[name] = 7
    assert remembered("x", [], counted(values)) == 7
    assert remembered("y", [], counted(values)) == 2
    assert len(notebook) == 2
    note_in(None)
    assert remembered("x", [], counted(values)) == 1


def test_a_folder_that_cannot_be_written_is_no_obstacle(monkeypatch: pytest.MonkeyPatch):
    note_in(None)
    monkeypatch.setenv("OMNIDRAFT_CACHE", "/dev/null/none")
    values = [1, 2]
    assert [remembered("x", [], counted(values)) for _ in range(2)] == [1, 2]
