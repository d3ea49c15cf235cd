"""`omnidraft memory` on the command line: the memory of stopped and of finished runs, and how it forgets."""

import json
from pathlib import Path
from typing import Any

import pytest
from replaying import Command, StoppingDisplay, config_of, table_of
from tiny_pair import TinyPair

from pipeline.run.replay import Replay
from pipeline.run.stored_memory import edit_memories, read_memories
from stages.memory.ngram_table import scope_of

CHANGES = {"draft__sources": ("own", "memory"), "learn__enabled": False, "commit__seconds": 1e-9}


@pytest.fixture
def stopped(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A run that was stopped after six prompts."""
    folder = tmp_path / "stopped"
    with StoppingDisplay(6) as display:
        summary = Replay(config_of(tiny_pair, **CHANGES), folder).run(display)
    assert summary["stopped"]
    return folder


def test_a_stopped_run_shows_its_memory(stopped: Path, omnidraft: Command):
    typed = omnidraft("memory", "show", stopped, "--json")
    assert typed.status == 0, typed.err
    (found,) = json.loads(typed.out)
    completed = len(table_of(stopped, "prompts"))
    assert found["texts"] == completed >= 6
    assert 0 < found["contexts"] * 52 <= found["bytes"]
    assert len(found["commonest"]) == 10
    counts = [line["count"] for line in found["commonest"]]
    assert counts == sorted(counts, reverse=True)
    assert "contexts in" in omnidraft("memory", "show", "--runs", stopped.parent, "--top", "2").out


def test_forgetting_every_prompt_leaves_an_empty_memory(stopped: Path, omnidraft: Command):
    for offset in table_of(stopped, "prompts")["offset"].to_pylist():
        typed = omnidraft("memory", "forget", stopped, "--prompt", offset)
        assert typed.status == 0, typed.err
    (found,) = read_memories(stopped)
    assert len(found.table) == 0


def test_the_contexts_of_a_tenant_are_shown_for_its_key_alone(stopped: Path, omnidraft: Command):
    def show_contexts(*options: str) -> list[dict[str, Any]]:
        typed = omnidraft("memory", "show", stopped, "--json", "--top", "100000", *options)
        assert typed.status == 0, typed.err
        found: list[dict[str, Any]] = json.loads(typed.out)[0]["commonest"]
        return found

    others = show_contexts()
    edit_memories(stopped, lambda _, table: table.learn([1, 2, 3, 4], 1, scope_of("key")))
    assert show_contexts() == others
    assert len(show_contexts("--tenant", "key")) == 6
    assert show_contexts("--tenant", "another") == []


def test_a_tenant_is_forgotten(stopped: Path, omnidraft: Command):
    before = len(read_memories(stopped)[0].table)
    edit_memories(stopped, lambda _, table: table.learn([1, 2, 3, 4], 1, scope_of("key")))
    assert len(read_memories(stopped)[0].table) == before + 6
    typed = omnidraft("memory", "forget", stopped, "--tenant", "key")
    assert typed.out == "forgot 6 contexts\n"
    again = omnidraft("memory", "forget", stopped, "--tenant", "key", "--json")
    assert json.loads(again.out) == {"contexts": 0}
    assert len(read_memories(stopped)[0].table) == before
