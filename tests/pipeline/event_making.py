"""Completed prompts for tests that care about their counts alone."""

from typing import Any

from store.events import PromptCompleted


def completed(offset: int, *, judged: int = 20, accepted: int = 10, **others: Any) -> PromptCompleted:
    """A prompt of ten blocks and one second. The first position goes like the others unless given."""
    fields: dict[str, Any] = {
        "offset": offset,
        "prompt_id": f"p{offset}",
        "dataset": "docs",
        "target": "big",
        "prompt_text": "Once",
        "completion_text": " upon a time",
        "finish": "length",
        "prompt_tokens": 1,
        "emitted": accepted + 10,
        "blocks": 10,
        "drafted": judged + 5,
        "judged": judged,
        "accepted": accepted,
        "first_judged": judged,
        "first_accepted": accepted,
        "started": float(offset),
        "finished": offset + 1.0,
        "drafter_version": 0,
    }
    return PromptCompleted(**{**fields, **others})
