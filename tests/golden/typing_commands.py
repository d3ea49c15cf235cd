"""Paths of the golden data, and a function that runs `omnidraft` in this process."""

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from product import main

HERE = Path(__file__).parent
FROZEN, UNFINISHED = HERE / "frozen", HERE / "unfinished-run"


def type_command(words: Sequence[object]) -> int:
    """Run `omnidraft` with these words in this process. Returns the exit status."""
    with patch.object(sys, "argv", ["omnidraft", *map(str, words)]), pytest.raises(SystemExit) as end:
        main()
    return end.value.code if isinstance(end.value.code, int) else int(end.value.code is not None)
