"""Events with readable defaults, and a small run whose metrics can be worked out by hand."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from event_making import make_completed, make_drifted, make_published, make_updated

from store.events import (
    BlockDone,
    Drifted,
    Event,
    Origin,
    Outcome,
    PromptCompleted,
    PromptRejected,
    Recalled,
    TokenDecision,
    Translation,
    Updated,
)
from store.files import digest_of
from store.log.manifest import MANIFEST, digest_of_content
from store.log.run_log import RunLog
from store.query.log_reader import LogReader


def decision(**changes: Any) -> TokenDecision:
    """An accepted direct token: 0.25 < min(1, 0.5 / 0.5)."""
    fields: dict[str, Any] = {
        "offset": 0,
        "prompt_id": "docs-0",
        "dataset": "docs",
        "target": "big",
        "block": 0,
        "position": 0,
        "index": 0,
        "pieces": (7,),
        "translation": Translation.DIRECT,
        "proposed_id": 70,
        "proposed_bytes": b" the",
        "outcome": Outcome.ACCEPTED,
        "emitted_id": 70,
        "emitted_bytes": b" the",
        "origin": Origin.ACCEPTED,
        "drafter_levels": (0.5,),
        "target_levels": (0.5,),
        "uniform": 0.25,
        "head_estimate": 0.75,
        "entropy": 1.5,
        "drafter_version": 0,
        "head_version": 0,
        "cache_version": 0,
    }
    return TokenDecision(**(fields | changes))


def make_rejection(**changes: Any) -> TokenDecision:
    """0.75 is not below 0.125 / 0.25: rejected, another token emitted."""
    fields: dict[str, Any] = {
        "outcome": Outcome.REJECTED,
        "emitted_id": 71,
        "emitted_bytes": b" a",
        "origin": Origin.RESIDUAL,
        "drafter_levels": (0.25,),
        "target_levels": (0.125,),
        "uniform": 0.75,
        "head_estimate": 0.35,
        "target_raw_probability": 0.25,
        "emitted_raw_probability": 0.5,
        "target_raw_entropy": 1.0,
    }
    return decision(**(fields | changes))


def make_unjudged(**changes: Any) -> TokenDecision:
    fields: dict[str, Any] = {
        "outcome": Outcome.UNJUDGED,
        "emitted_id": None,
        "emitted_bytes": None,
        "origin": None,
        "drafter_levels": (),
        "target_levels": (),
        "uniform": None,
    }
    return decision(**(fields | changes))


def bonus(**changes: Any) -> TokenDecision:
    fields: dict[str, Any] = {
        "pieces": (),
        "translation": Translation.NONE,
        "proposed_id": None,
        "proposed_bytes": None,
        "outcome": Outcome.UNDRAFTED,
        "emitted_id": 72,
        "emitted_bytes": b"\n",
        "origin": Origin.BONUS,
        "drafter_levels": (),
        "target_levels": (),
        "uniform": None,
        "head_estimate": None,
        "entropy": None,
    }
    return decision(**(fields | changes))


def block(**changes: Any) -> BlockDone:
    fields: dict[str, Any] = {
        "offset": 0,
        "dataset": "docs",
        "block": 0,
        "rows": 1,
        "drafted": 3,
        "proposed": 3,
        "judged": 2,
        "accepted": 1,
        "emitted": 2,
        "seconds_decode": 0.25,
        "seconds_translate": 0.125,
        "seconds_verify": 0.5,
    }
    return BlockDone(**(fields | changes))


def prompt(**changes: Any) -> PromptCompleted:
    fields: dict[str, Any] = {
        "offset": 0,
        "prompt_id": "docs-0",
        "prompt_text": "Tell me",
        "completion_text": " the a\n",
        "prompt_tokens": 2,
        "emitted": 4,
        "blocks": 2,
        "drafted": 5,
        "judged": 3,
        "accepted": 2,
    }
    return make_completed(**(fields | changes))


def make_update(**changes: Any) -> Updated:
    rates = {"acceptance_before": 0.5, "acceptance_after": 0.625, "acceptance_baseline": 0.25, "tokens_gained": 6.0}
    fields: dict[str, Any] = {"positions": 64, "reason": "better on the window", "seconds": 0.5, "waited": 0.25}
    return make_updated(**(rates | fields | changes))


def make_drift(**changes: Any) -> Drifted:
    return make_drifted(**({"rate_before": 0.75, "action": "reset"} | changes))


def make_recall(**changes: Any) -> Recalled:
    fields: dict[str, Any] = {
        "offset": 0,
        "target": "big",
        "version": 1,
        "candidates": 3,
        "prompts": 5,
        "acceptance_present": 0.25,
        "acceptance_best": 0.5,
        "seconds": 0.5,
    }
    return Recalled(**(fields | changes))


def two_blocks(offset: int, dataset: str, drafter_version: int = 0) -> list[TokenDecision]:
    """A prompt of four tokens: accepted and rejected (one left unjudged), then accepted (two pieces) and a bonus."""
    place: dict[str, Any] = {
        "offset": offset,
        "dataset": dataset,
        "prompt_id": f"{dataset}-{offset}",
        "drafter_version": drafter_version,
    }
    pair: dict[str, Any] = {
        "pieces": (8, 9),
        "translation": Translation.NGRAM,
        "drafter_levels": (0.5, 0.5),
        "target_levels": (0.25, 1.0),
    }
    return [
        decision(**place, block=0, index=0, position=0),
        make_rejection(**place, block=0, index=1, position=1),
        make_unjudged(**place, block=0, index=2, position=2),
        decision(**place, **pair, block=1, index=0, position=2),
        bonus(**place, block=1, index=1, position=3),
    ]


def small_run_events() -> list[Event]:
    """Ten prompts of `docs`, then five of `code`, of one second each, one after the other; see the tests for the sums.

    Every prompt emits 4 tokens in 2 blocks, 3 judged and 2 accepted, but for the last two of `docs` (3 accepted) and
    all of `code` (1 accepted).
    """
    events: list[Event] = [make_published(), PromptRejected("docs", 3, "no field 'text'")]
    for offset in range(15):
        dataset = "docs" if offset < 10 else "code"
        accepted = 1 if dataset == "code" else 3 if offset >= 8 else 2
        place: dict[str, Any] = {"offset": offset, "dataset": dataset}
        version = 1 if offset >= 8 else 0
        events += two_blocks(offset, dataset, version)
        events += [block(**place, block=0), block(**place, block=1, judged=1)]
        times = {"started": float(offset), "finished": offset + 1.0}
        events.append(prompt(**place, **times, prompt_id=f"{dataset}-{offset}", accepted=accepted))
    events.insert(-1, make_update(offset=7, seconds=0.5))
    events += [
        make_update(
            offset=13, served=False, reason="no better", seconds=0.25, acceptance_after=0.5, tokens_gained=-2.5
        ),
        make_drift(offset=12, dataset="code", changed_at=10),
        make_recall(offset=12),
        make_published(offset=7, version=1, parent=0, reason="interval", drafter_version=1),
        make_published(offset=12, version=2, parent=1, reason="drift", drafter_version=1, acceptance=0.5),
    ]
    return events


def write_run(folder: Path, events: list[Event]) -> Path:
    """A closed run of `events` at `folder`."""
    with RunLog(folder) as log:
        for event in events:
            log.append(event)
    return folder


def problems(folder: Path, events: list[Event]) -> list[str]:
    """What the check finds in a run of these events."""
    with LogReader([write_run(folder, events)]) as log:
        return log.check().mismatches["problem"].to_pylist()


def single(value: float) -> float:
    """The float32 nearest to `value`."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def change_manifest(run: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the content of a manifest, and state the digest of the result."""
    content = json.loads((run / MANIFEST).read_bytes())
    edit(content)
    (run / MANIFEST).write_text(json.dumps({**content, "digest": digest_of_content(content)}), encoding="utf-8")


def commit_changes(run: Path) -> None:
    """Make the manifest name the parts as they are now, as if they had been written so."""

    def edit(content: dict[str, Any]) -> None:
        for part in (part for parts in content["tables"].values() for part in parts):
            path = run / MANIFEST.parent / part["file"]
            part |= {"bytes": path.stat().st_size, "sha256": digest_of(path)}

    change_manifest(run, edit)
