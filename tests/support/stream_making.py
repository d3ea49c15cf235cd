"""Sample runs with every kind of event."""

from pathlib import Path
from typing import Any

import synthetic_runs
from event_making import make_completed, make_drifted, make_published, make_updated

from store.events import (
    BlockDone,
    DraftSource,
    Event,
    Origin,
    Outcome,
    PromptCompleted,
    Recalled,
    TokenDecision,
    Translation,
)
from store.log.run_log import Commit, RunLog

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'></textarea></style>"
    "\"'&amp;{{ 7 * 7 }} \u202eabc\x1b[31m \U0001f600 \u0634\u0643\u0631\u0627"
)


def decision(offset: int, index: int, **changes: Any) -> TokenDecision:
    """Make an accepted direct token " the" in a block of its own."""
    place: dict[str, Any] = {"offset": offset, "prompt_id": f"p{offset}", "position": index, "index": index}
    return synthetic_runs.decision(**({"target_levels": (0.4,)} | place | changes))


def block_of_every_kind(offset: int, **place: Any) -> list[TokenDecision]:
    """Make two blocks: accepted, accepted n-gram, rejected with its residual, unjudged; then looked up and a bonus."""
    ngram: dict[str, Any] = {"pieces": (8, 9), "translation": Translation.NGRAM, "proposed_id": 80, "emitted_id": 80}
    texts = {"proposed_bytes": b" check", "emitted_bytes": b" check"}
    rejected: dict[str, Any] = {
        "outcome": Outcome.REJECTED, "proposed_bytes": b" wrong", "emitted_id": 71, "emitted_bytes": b" right",
        "origin": Origin.RESIDUAL, "uniform": 0.9,
    }  # fmt: skip
    named: dict[str, Any] = {"offset": offset, "prompt_id": f"p{offset}", **place}
    lookup: dict[str, Any] = {"drafter": DraftSource.LOOKUP, "drafter_levels": (1.0,), "block": 1, "position": 3}
    return [
        decision(offset, 0, **place),
        decision(offset, 1, **{"drafter_levels": (0.5, 0.5), "target_levels": (0.4, 0.5)} | ngram | texts | place),
        decision(offset, 2, **rejected | place),
        synthetic_runs.make_unjudged(**{"index": 3, "position": 3, "proposed_bytes": b" ghost"} | named),
        decision(offset, 0, **lookup | place),
        synthetic_runs.bonus(**{"index": 1, "block": 1, "position": 4} | named),
    ]


def blocks(offset: int, dataset: str = "docs") -> list[BlockDone]:
    """Make the block events of `block_of_every_kind`."""
    return [
        BlockDone(offset, dataset, 0, 1, 5, 4, 3, 2, 3, 0.25, 0.125, 0.5),
        BlockDone(offset, dataset, 1, 1, 1, 1, 1, 1, 2, 0.25, 0.125, 0.5, DraftSource.LOOKUP),
    ]


def prompt(offset: int, **others: Any) -> PromptCompleted:
    """Make a prompt of one second and five tokens in two blocks; half of the judged tokens are accepted."""
    fields: dict[str, Any] = {"judged": 4, "accepted": 2, "emitted": 5, "blocks": 2}
    return make_completed(offset, **fields | others)


def stream(prompts: int = 60, first: int = 0) -> list[Event]:
    """Make events of two datasets with a drift between them, updates, a recall, and versions with cache evictions.

    `docs` has acceptance 0.5, `code` 0.25. The cache has 10 insertions up to version 1, then 5 and 3 evictions.
    """
    events: list[Event] = [make_published()] if not first else []
    for offset in range(first, prompts):
        code = offset >= 30
        place: dict[str, Any] = {"dataset": "code" if code else "docs"}
        events += block_of_every_kind(offset, **place) + blocks(offset, place["dataset"])
        events.append(prompt(offset, **place, accepted=1 if code else 2, drafter_version=offset // 10))
        if offset % 10 == 9:
            events.append(
                make_updated(offset=offset, served=offset != 49, tokens_gained=4.0, drafter_version=offset // 10)
            )
    if first < 30 <= prompts:
        events += [
            make_published(offset=29, version=1, parent=0, reason="interval", cache_version=10, cache_entries=10),
            make_drifted(offset=33, dataset="code", changed_at=30),
            make_published(offset=32, version=2, parent=1, reason="drift", cache_version=13, cache_entries=11),
            Recalled(33, "big", 0, 2, 4, 0.25, 0.45, 0.5),
            make_published(offset=49, version=3, parent=2, reason="interval", cache_version=18, cache_entries=12),
        ]
    return events


def write(folder: Path, events: list[Event]) -> Path:
    """Write a finished run."""
    with RunLog(folder) as log:
        append(log, events)
    return folder


def append(log: RunLog, events: list[Event], *, commit: bool = False) -> None:
    """Add events to a run; with `commit`, such that readers see them when this returns."""
    for event in events:
        log.append(event)
    if commit:
        log.commit(Commit(dict), wait=True)
