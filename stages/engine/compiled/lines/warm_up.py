"""Compiling all functions of lines, or loading them: before they are called, and during work that nobody times."""

from stages.engine.compiled.lines.draw import compile_draw
from stages.engine.compiled.lines.largest_logits import compile_selection
from stages.engine.compiled.lines.piece_estimates import compile_estimation
from stages.engine.compiled.lines.token_values import compile_reading


def compile_lines() -> None:
    """Compile what is called between two passes, which takes some seconds on the first start of a release."""
    for compile_one in (compile_draw, compile_reading, compile_estimation, compile_selection):
        compile_one()
