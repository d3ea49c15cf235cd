"""Compiling all functions of lines, or loading them: before they are called, and during work that nobody times."""

from stages.engine.compiled.lines.draw import draw_index
from stages.engine.compiled.lines.largest_logits import select_lines
from stages.engine.compiled.lines.piece_estimates import estimate_lines
from stages.engine.compiled.lines.token_values import read_values


def compile_lines() -> None:
    """Compile what is called between two passes, which takes some seconds on the first start of a release."""
    for call in (draw_index, read_values, estimate_lines, select_lines):
        call.prepare()
