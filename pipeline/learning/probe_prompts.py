"""The probe's prompts: fixed texts, so that versions of any run, machine and Python compare.

Docs and code come from modules of the Python standard library (3.11, PSF licence) that are held out of the built-in
models' training: the first words of paragraphs in the midst of a docstring, and the first lines of functions without
one. The others are beginnings of functions in Rust, which the built-in drafters were not trained on. No built-in stream
yields any of them.
"""

import hashlib
import json
from pathlib import Path

_FILE = Path(__file__).with_suffix(".json")
# Kind ("docs", "code" or "rust") and text of each.
PROMPTS: tuple[tuple[str, str], ...] = tuple(map(tuple, json.loads(_FILE.read_text(encoding="utf-8"))))


def identity() -> str:
    """Return a digest of the prompts, for the names of data sets and of cached files."""
    return f"{len(PROMPTS)} prompts, {hashlib.sha256(repr(PROMPTS).encode()).hexdigest()[:12]}"
