"""Paths of the golden data, and a function that runs `omnidraft` in this process."""

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from product import main

HERE = Path(__file__).parent
FROZEN = HERE / "frozen"
PAIR = HERE / "pair"  # a target and a drafter that are as small as possible, and two files of prompts


def type_command(words: Sequence[object]) -> int:
    """Run `omnidraft` with these words in this process. Returns the exit status."""
    with patch.object(sys, "argv", ["omnidraft", *map(str, words)]), pytest.raises(SystemExit) as end:
        main()
    return end.value.code if isinstance(end.value.code, int) else int(end.value.code is not None)
