"""Whole replays over a tiny pair: what they write, that it adds up, and that it is the same every time."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from replaying import Command, config_of, run_replay, table_of
from tiny_pair import TinyPair, sentences

from pipeline.config.settings import load
from store.errors import SourceError
from store.events import Outcome
from store.query.summary import summarize

PROMPTS = 10  # of each dataset
SETTINGS = {"batch": 2, "sampling__temperature": 1.0}


@pytest.fixture(scope="module")
def run(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two prompts at a time that learned, drawn at temperature 1."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    run_replay(config_of(tiny_pair, **SETTINGS), folder)
    return folder


def rows_of(run: Path, table: str) -> list[dict[str, Any]]:
    return table_of(run, table).to_pylist()


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def test_a_run_leaves_its_settings_its_log_and_its_summary(run: Path, tiny_pair: TinyPair):
    files = {".lock", "answers.jsonl", "checkpoint", "config.json", "log", "summary.json", "vocabulary.json"}
    assert {path.name for path in run.iterdir()} == files
    assert load(run / "config.json") == config_of(tiny_pair, **SETTINGS)
    summary = summary_of(run)
    assert summary.pop("check") == {"decisions": len(rows_of(run, "decisions")), "judged": ANY, "mismatches": 0}
    assert summary == summarize(run)


def test_every_prompt_is_completed_once_with_its_text(run: Path):
    prompts = rows_of(run, "prompts")
    assert sorted(prompt["offset"] for prompt in prompts) == list(range(2 * PROMPTS))
    texts = {prompt["offset"]: prompt["prompt_text"] for prompt in prompts}
    assert texts[0] == sentences(300, 301)[0][:30]
    assert texts[PROMPTS] == sentences(400, 401)[0][:30]
    assert {prompt["dataset"] for prompt in prompts if prompt["offset"] < PROMPTS} == {"sums"}


def test_a_prompt_s_decisions_are_its_completion(run: Path):
    decisions = rows_of(run, "decisions")
    for prompt in rows_of(run, "prompts"):
        mine = [row for row in decisions if row["offset"] == prompt["offset"]]
        emitted = [row for row in mine if row["emitted_id"] is not None]
        assert [row["position"] for row in emitted] == list(range(prompt["emitted"]))
        text = b"".join(row["emitted_bytes"] or b"" for row in emitted).decode(errors="replace")
        assert text == prompt["completion_text"]
        judged = [row for row in mine if row["outcome"] in (Outcome.ACCEPTED, Outcome.REJECTED)]
        assert len(judged) == prompt["judged"] + prompt["lookup_judged"]
        assert sum(row["drafter"] != "model" for row in judged) == prompt["lookup_judged"]
        accepted = sum(row["outcome"] == Outcome.ACCEPTED for row in mine)
        assert accepted == prompt["accepted"] + prompt["lookup_accepted"]
        assert len({row["block"] for row in mine}) == prompt["blocks"]


@pytest.mark.slow
@pytest.mark.representatives(2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.constants(gate_every=3)
def test_the_same_seed_makes_the_same_decisions(tiny_pair: TinyPair, tmp_path: Path, batch: int, temperature: float):
    config = config_of(tiny_pair, batch=batch, sampling__temperature=temperature)
    for name in ("first", "second"):
        run_replay(config, tmp_path / name)
    first, second = (table_of(tmp_path / name, "decisions") for name in ("first", "second"))
    assert first.num_rows > 100
    assert first.equals(second)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("mode", ["trie", "coupled", "match", "tli", "paper"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_decision_can_be_derived_again(
    tiny_pair: TinyPair, tmp_path: Path, omnidraft: Command, mode: str, temperature: float
):
    config = config_of(tiny_pair, draft__mode=mode, sampling__temperature=temperature, batch=2)
    run_replay(config, tmp_path / "run")
    checked = omnidraft("check", "--run", tmp_path / "run")
    assert (checked.status, checked.err) == (0, "")
    assert " 0 mismatches" in checked.out


BAD_ROWS = [
    ('{"prompt": "Ann has 3 apples"}', None),
    ('{"prompt": "Ann has', "JSON"),
    ('{"prompt": "  "}', "empty"),
    ('{"question": "Ann has 3 apples"}', "column"),
    (json.dumps({"prompt": "Ann has 3 apples. " * 400}), "target's tokens, got"),
    (b'{"prompt": "Ann \xff has"}', "UTF-8"),
    ('{"prompt": "Tom has 4 pencils"}', None),
]


def test_rows_that_are_no_prompts_are_set_aside(tiny_pair: TinyPair, tmp_path: Path):
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row, _ in BAD_ROWS))
    summary = run_replay(config_of(tiny_pair, sources=(str(path),), batch=3), tmp_path / "run")
    rejected = [json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    expected = {line: word for line, (_, word) in enumerate(BAD_ROWS, 1) if word}
    assert {row["line"] for row in rejected} == set(expected)
    assert all(expected[row["line"]] in row["reason"] for row in rejected), rejected
    assert {row["dataset"] for row in rejected} == {"mixed"}
    assert summary["rejected_rows"] == len(expected)
    assert summary["totals"]["prompts"] == 2


def test_what_was_done_is_kept_when_a_source_breaks_off(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def break_off(sources: object) -> Any:
        from pipeline.sources.stream import stream

        for event in stream(sources):  # type: ignore[arg-type]
            yield event
            if event.line == 4:
                raise SourceError("The source 'sums' broke off: no route to host.")

    monkeypatch.setattr("pipeline.run.replay.stream", break_off)
    with pytest.raises(SourceError, match="broke off"):
        run_replay(config_of(tiny_pair), tmp_path / "run")
    assert summary_of(tmp_path / "run")["totals"]["prompts"] == len(rows_of(tmp_path / "run", "prompts")) == 4
