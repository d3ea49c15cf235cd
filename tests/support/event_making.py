"""Events for tests that care about a few of their fields alone."""

from typing import Any

from store.events import Drifted, PromptCompleted, Updated, VersionPublished


def make_completed(offset: int, *, judged: int = 20, accepted: int = 10, **others: Any) -> PromptCompleted:
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
        "started": float(offset),
        "finished": offset + 1.0,
        "drafter_version": 0,
    }
    return PromptCompleted(**{**fields, **others})


def make_drifted(**others: Any) -> Drifted:
    """A fall that was answered by a recall."""
    fields: dict[str, Any] = {
        "offset": 0,
        "target": "big",
        "dataset": "docs",
        "detector": "page-hinkley",
        "changed_at": 0,
        "rate_before": 0.8,
        "rate_after": 0.25,
        "action": "recall",
        "description": "drift at prompt 0 (docs): acceptance fell from 0.80 to 0.25 at prompt 0; the head is reset",
    }
    return Drifted(**{**fields, **others})


def make_updated(**others: Any) -> Updated:
    """A step of the drafter that no gate saw."""
    fields: dict[str, Any] = {
        "offset": 0,
        "target": "big",
        "part": "drafter",
        "loss_name": "trie",
        "loss": 1.25,
        "positions": 40,
        "acceptance_before": None,
        "acceptance_after": None,
        "acceptance_baseline": None,
        "tokens_gained": None,
        "served": True,
        "reason": "as given",
        "seconds": 0.0,
        "waited": 0.0,
        "drafter_version": 1,
        "head_version": 0,
    }
    return Updated(**{**fields, **others})


def make_published(**others: Any) -> VersionPublished:
    """A baseline version."""
    fields: dict[str, Any] = {
        "offset": 0,
        "version": 0,
        "target": "big",
        "parent": None,
        "reason": "baseline",
        "drafter_version": 0,
        "head_version": 0,
        "cache_version": 0,
        "cache_entries": 0,
        "acceptance": None,
        "folder": "versions/000000",
        "digest": "",
    }
    return VersionPublished(**{**fields, **others})
