"""What the end of a run says of its newest version."""

from types import SimpleNamespace
from typing import Any

import pytest

from store.query.probe_gain import describe_newest

TOKENS, FORWARDS = [10] * 8, [8] * 8


def version(number: int, greedy: list[int] | None, parent: int | None = 0, target: str = "big") -> dict[str, Any]:
    count = len(greedy or [])
    probe = {"probe_greedy": greedy or [], "probe_sampled": greedy or [], "probe_tokens": TOKENS[:count]}
    probe["probe_forwards"] = FORWARDS[:count]
    digest = f"digest {number}"
    return {"run": "a", "target": target, "version": number, "parent": parent, "drafter_digest": digest, **probe}


def describe(*rows: dict[str, Any]) -> list[str]:
    log: Any = SimpleNamespace(select=lambda _: SimpleNamespace(to_pylist=lambda: list(rows)))
    return list(describe_newest(log))


@pytest.mark.parametrize(
    ("greedy", "words"),
    [
        ([8, 7] * 4, "is better than the baseline on the probe: +55.0"),
        ([0, 1] * 4, "is worse than"),
        ([2, 2, 3, 1] * 2, "is not clearly different from the baseline on the probe: +0.0"),
    ],
)
def test_the_newest_version_is_compared_with_the_baseline_of_its_target(greedy: list[int], words: str):
    (sentence,) = describe(version(0, [2] * 8, None), version(4, greedy))
    assert sentence.startswith(f"Version 4, the newest, {words}")


def test_nothing_is_said_without_a_probe_or_a_later_version():
    assert describe(version(0, [2] * 8, None)) == []
    assert describe(version(0, [2, 2], None), version(1, [8, 8])) == [], "of two prompts nothing is sure"
    assert describe(version(0, None, None), version(1, None)) == []
    same = {**version(4, [8, 7] * 4), "drafter_digest": "digest 0"}
    assert describe(version(0, [2] * 8, None), same) == [], "equal drafters"
    assert describe(version(0, [2] * 8, None, "other"), version(1, [3] * 8)) == []
