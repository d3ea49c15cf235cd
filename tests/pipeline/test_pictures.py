"""Pictures are drawn by processes of their own; one that fails says why and stops nothing."""

from pathlib import Path

from pipeline.pictures import draw, of_run
from store.log import RunLog


def test_a_picture_that_cannot_be_drawn_says_why(tmp_path: Path):
    assert "No module named" in str(draw("watercolours"))
    assert "must be a run's folder" in str(draw("curve", str(tmp_path), str(tmp_path / "curve.png")))


def test_a_run_has_its_curve_and_its_tokens_even_without_a_prompt(tmp_path: Path):
    with RunLog(tmp_path):
        pass
    assert [file.name for file in of_run(tmp_path) if file.is_file()] == ["acceptance.png", "tokens.html"]
