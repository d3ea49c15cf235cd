"""Records of a study for tests that run no model."""

from collections.abc import Sequence
from typing import Any

from benchmarks.studies.records import Alarm, Key, PromptCounts, Record


def make_passed(offset: int, *, judged: int = 20, accepted: int = 10, emitted: int | None = None) -> PromptCounts:
    """A prompt of ten blocks that ends a second after the one before it and takes half a second of the processor."""
    emitted = accepted + 10 if emitted is None else emitted
    return PromptCounts(offset, emitted, 10, judged + 5, judged, accepted, at=offset + 1.0, cpu=(offset + 1) / 2)


def record(
    accepted: Sequence[int], *, target: str = "big", arm: str = "hybrid", seed: int = 0, **others: Any
) -> Record:
    """A run of one prompt per number: so many of its 20 judged tokens were accepted. Learning takes a last second."""
    fields: dict[str, Any] = {
        "key": Key(target, seed, arm),
        "passed": tuple(make_passed(offset, accepted=number) for offset, number in enumerate(accepted)),
        "alarms": (),
        "recalls": (),
        "segments": (0, len(accepted)),
        "seconds": len(accepted) + 1.0,
        "cpu_seconds": len(accepted) / 2 + 0.5,
        "learning": 1.0,
        "cache_bytes": 2048,
        "cache_entries": 7,
        "rejected": 0,
        "prompts": f"prompts of seed {seed}",
        "same_vocabulary": False,
        "machine": {"device": "a processor", "cores": 2, "threads": 1, "load": 0.5, "torch": "2.13"},
    }
    return Record(**{**fields, **others})


def fall(offset: int, action: str = "reset") -> Alarm:
    return Alarm(offset, action)
