"""Gemma 3 270M, a model with sliding windows of another family and vocabulary: alone, with SmolLM2 in one stream, and
with SmolLM2 as its drafter.

It is fetched as by `omnidraft zoo gemma3-270m`, or taken from the user's cache.
"""

import json
from pathlib import Path

import pytest
from real_models import config_for, encode, generate, needs_smollm2
from replaying import run_replay, table_of

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1800), needs_smollm2]

NEW_TOKENS = 16
WINDOW = 512  # tokens that a sliding layer of Gemma 3 270M reads
COUNTING = "The list of the numbers, one after another: " + ", ".join(map(str, range(1, 190)))
SHORT = ("The capital of France is", "Water boils when", "In the year 1969, the first man")


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def completions(run: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    """Target, prompt and emitted tokens of every prompt."""
    prompts = sorted(table_of(run, "prompts").to_pylist(), key=lambda row: row["offset"])
    rows = [row for row in table_of(run, "decisions").to_pylist() if row["emitted_id"] is not None]
    rows.sort(key=lambda row: (row["block"], row["index"]))
    return [
        (one["target"], one["prompt_text"], tuple(row["emitted_id"] for row in rows if row["offset"] == one["offset"]))
        for one in prompts
    ]


def expect(found: list[tuple[str, str, tuple[int, ...]]], chats: tuple[str, ...] = ()) -> list[tuple[int, ...]]:
    return [
        generate(target, [encode(target, prompt, chat=target in chats)], NEW_TOKENS)[0] for target, prompt, _ in found
    ]


@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_texts_past_the_window_equal_generate(gemma3: str, tmp_path: Path, batch: int):
    prompts = [COUNTING, SHORT[0], COUNTING[: len(COUNTING) // 3], COUNTING.replace("numbers", "integers")]
    source = write_rows(tmp_path / "long.jsonl", [{"prompt": text} for text in prompts])
    run_replay(config_for([gemma3], [source], batch=batch, sampling__max_new_tokens=NEW_TOKENS), tmp_path / "run")
    found = completions(tmp_path / "run")
    assert len(encode(gemma3, COUNTING, chat=False)) > WINDOW + 100
    assert [tokens for *_, tokens in found] == expect(found)


def test_two_families_share_a_drafter_in_one_stream(smollm2: str, gemma3: str, tmp_path: Path):
    rows = [{"prompt": text, "target": target} for text in SHORT for target in (smollm2, gemma3)]
    source = write_rows(tmp_path / "mixed.jsonl", rows)
    config = config_for([smollm2, gemma3], [source], batch=2, sampling__max_new_tokens=NEW_TOKENS, learn__interval=2)
    run_replay(config, tmp_path / "run")
    found = completions(tmp_path / "run")
    assert {target for target, *_ in found} == {smollm2, gemma3}
    assert [tokens for *_, tokens in found] == expect(found, chats=(smollm2,))
    assert [row for row in table_of(tmp_path / "run", "updates").to_pylist() if row["served"]]


def test_smollm2_drafts_for_gemma3(smollm2: str, gemma3: str, tmp_path: Path):
    source = write_rows(tmp_path / "short.jsonl", [{"prompt": text} for text in SHORT])
    config = config_for(
        [gemma3], [source], drafter=smollm2, sampling__max_new_tokens=NEW_TOKENS, learn__rate=1e-5, learn__interval=2
    )
    run_replay(config, tmp_path / "run")
    found = completions(tmp_path / "run")
    assert [tokens for *_, tokens in found] == expect(found)
    prompts = table_of(tmp_path / "run", "prompts").to_pylist()
    assert sum(row["accepted"] for row in prompts) > 0.25 * sum(row["judged"] for row in prompts)
