"""The terms that the pages use, each explained in a sentence. docs/glossary.md has them all."""

import json
from pathlib import Path

_LISTED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TERMS: dict[str, str] = _LISTED["terms"]
PAGE_TERMS: dict[str, list[str]] = _LISTED["pages"]  # in the order in which a page needs them


def list_terms(page: str) -> list[tuple[str, str]]:
    """Return the terms of a page with their explanations."""
    return [(term, TERMS[term]) for term in PAGE_TERMS.get(page, ())]
