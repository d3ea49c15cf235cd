"""Runs in mode `coupled`: one text per seed, whatever drafts, learns or interrupts them."""

from pathlib import Path
from typing import Any

import pytest
from replaying import Command, StoppingDisplay, config_of, run_replay, table_of
from tiny_pair import TinyPair

from pipeline.run.replay import Replay
from store.query.log_reader import LogReader

COUPLED = {"draft__mode": "coupled", "sampling__temperature": 1.0}


def texts_of(run: Path) -> dict[int, str]:
    return {row["offset"]: row["completion_text"] for row in table_of(run, "prompts").to_pylist()}


@pytest.fixture(scope="module")
def plain(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The texts of plain decoding."""
    run = tmp_path_factory.mktemp("coupled") / "plain"
    run_replay(config_of(tiny_pair, draft__max_draft=0, learn__enabled=False, **COUPLED), run)
    assert len(set(texts_of(run).values())) > 10, "the texts must be drawn"
    return texts_of(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 8},
        {"draft__sources": ("model",), "draft__width": 1, "draft__stop": "never"},
        {"draft__temperature": 0.2, "batch": 3},
        {"cache__budget_bytes": 1, "learn__enabled": False},
    ],
    ids=["batch", "chains", "cold drafter", "no n-grams"],
)
def test_the_text_is_that_of_plain_decoding_while_the_drafter_learns(
    tiny_pair: TinyPair, tmp_path: Path, plain: dict[int, str], changes: dict[str, Any]
):
    run_replay(config_of(tiny_pair, **COUPLED, **changes), tmp_path / "run")
    assert texts_of(tmp_path / "run") == plain
    accepted = [row["accepted"] for row in table_of(tmp_path / "run", "prompts").to_pylist()]
    assert sum(accepted) > len(accepted), "drafts must have been accepted"


def test_a_run_that_is_interrupted_and_resumed_has_the_same_text(
    tiny_pair: TinyPair, tmp_path: Path, plain: dict[int, str]
):
    config = config_of(tiny_pair, batch=2, **COUPLED)
    for prompts in (3, 6):
        with StoppingDisplay(prompts) as display:
            assert Replay(config, tmp_path / "run", resume=prompts > 3).run(display)["stopped"]
    with StoppingDisplay(99) as display:
        assert not Replay(config, tmp_path / "run", resume=True).run(display)["stopped"]
    assert texts_of(tmp_path / "run") == plain


def test_another_seed_gives_another_text(tiny_pair: TinyPair, tmp_path: Path, plain: dict[int, str]):
    run_replay(config_of(tiny_pair, seed=5, learn__enabled=False, **COUPLED), tmp_path / "run")
    assert sum(text != plain[offset] for offset, text in texts_of(tmp_path / "run").items()) > 10


def test_the_log_has_the_numbers_that_decided(tiny_pair: TinyPair, tmp_path: Path, omnidraft: Command):
    run = tmp_path / "run"
    run_replay(config_of(tiny_pair, **COUPLED), run)
    assert " 0 mismatches" in omnidraft("check", "--run", run).out
    with LogReader([run]) as log:
        emitted = log.select("SELECT uniform FROM decisions WHERE emitted_id IS NOT NULL")
        (counts,) = log.select("SELECT count(*) AS all, count(DISTINCT noise) AS keys FROM prompts").to_pylist()
    assert emitted["uniform"].null_count == 0
    assert counts["keys"] == counts["all"] > 10
