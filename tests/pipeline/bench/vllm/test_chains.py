"""Chains on identical texts: greedy verification of what drafters propose, without a target."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pipeline.bench.vllm.chains import (
    ReplayedRow,
    compare_chains,
    make_memory,
    make_suffix,
    parse_numbers,
    read_texts,
    replay_texts,
)
from store.errors import UsageError

PROMPT, TEXT = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def test_a_draft_is_accepted_as_far_as_the_text_has_it():
    seen: list[Sequence[ReplayedRow]] = []

    def draft(rows: Sequence[ReplayedRow]) -> list[list[int]]:
        seen.append(rows)
        return [[2, 6, 0] if row.number else [] for row in rows]

    counts = replay_texts([[7], [8]], [[1, 2], [1, 2, 6, 4]], 2, draft)
    assert (counts.emitted, counts.passes, counts.steps, counts.drafted) == ([2, 4], [2, 2], 2, 3)
    assert seen[1] == [ReplayedRow(0, [7, 1, 2], 1, 1), ReplayedRow(1, [8, 1, 2, 6, 4], 1, 3)]
    assert counts.tokens_per_pass() == 1.5
    assert counts.tokens_per_pass(1) == 2


def test_a_request_enters_when_another_one_has_ended():
    def draft(rows: Sequence[ReplayedRow]) -> list[list[int]]:
        assert len(rows) == 1
        return [[] for _ in rows]

    assert replay_texts([[7], [8]], [[1, 2], [3]], 1, draft).passes == [2, 1]


def test_the_memory_drafts_what_a_text_before_had():
    memory = make_memory(8, 1, len(PROMPT) + len(TEXT))
    counts = replay_texts([PROMPT] * 6, [TEXT] * 6, 1, memory)
    assert counts.passes[0] > 5
    assert counts.passes[-1] <= 3, "the first token, and chains of eight"
    short = replay_texts([PROMPT] * 6, [TEXT] * 6, 1, make_memory(2, 1, len(PROMPT) + len(TEXT)))
    assert short.passes[-1] > counts.passes[-1]
    dear = replay_texts([PROMPT] * 6, [TEXT] * 6, 1, make_memory(8, 1, len(PROMPT) + len(TEXT), cost=1.0))
    assert dear.drafted < counts.drafted


def test_suffix_decoding_is_called_as_vllm_calls_it(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[object, ...]] = []

    class Cache:
        def __init__(self, **given: object) -> None:
            self.active_requests: set[int] = set()

        def start_request(self, number: int, prompt: Sequence[int]) -> None:
            self.active_requests.add(number)
            calls.append(("start", number, list(prompt)))

        def add_active_response(self, number: int, tokens: Sequence[int]) -> None:
            calls.append(("add", number, list(tokens)))

        def speculate(self, number: int, context: Sequence[int], **limits: float) -> SimpleNamespace:
            calls.append(("draft", list(context), limits["max_spec_factor"]))
            return SimpleNamespace(token_ids=[2])

        def stop_request(self, number: int) -> None:
            self.active_requests.remove(number)
            calls.append(("stop", number))

    module = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = Cache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    assert replay_texts([[7], [8]], [[1, 2, 3], [4]], 1, make_suffix(2.0)).passes == [2, 1]
    assert calls == [
        ("start", 0, [7]),
        ("add", 0, [1]),
        ("draft", [7, 1], 2.0),
        ("add", 0, [2, 3]),
        ("draft", [7, 1, 2, 3], 2.0),
        ("start", 1, [8]),
        ("add", 1, [4]),
        ("draft", [8, 4], 2.0),
        ("stop", 0),
    ]


def test_texts_are_those_of_the_arm_without_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "measured.json"
    rounds = [{"prompts": [PROMPT], "texts": [TEXT]}] * 3
    file.write_text(json.dumps([{"batch": 1, "arms": {"ngram": [], "plain": rounds}}]), encoding="utf-8")
    assert read_texts(file) == ([PROMPT] * 3, [TEXT] * 3)
    compare_chains(file, batch="1,2", drafts="4", cost="0,0.5", factor="")
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 2 * 2
    assert table[2].startswith("| memory, 4 drafts, cost 0 | 1 |")


@pytest.mark.parametrize("wrong", ["-1", "a", "1,,2", "nan"])
def test_wrong_numbers_are_a_mistake_of_the_user(wrong: str):
    with pytest.raises(UsageError, match="--cost must be numbers"):
        parse_numbers("--cost", wrong)
