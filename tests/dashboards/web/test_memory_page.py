"""Accepted tokens by source, context and spelling, and the entries of the n-gram cache, from synthetic logs."""

from pathlib import Path
from typing import Any

import pytest
from event_making import make_published
from serving_runs import Serve, read_table
from stream_making import block_of_every_kind, decision, prompt, write
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tree_making import NODES, make_tree

from dashboards.web.queries.held_ngrams import add_spelling, list_held
from dashboards.web.queries.memory import list_accepted, read_memory
from store.errors import UsageError
from store.events import DraftSource, Event
from store.query.log_reader import LogReader
from store.registry.ngram_file import write_ngrams


def make_copied(prompts: int = 4) -> list[Event]:
    """Make prompts of two direct tokens, " a" and " b", and a tree that matched three tokens, one of the prompt."""
    events: list[Event] = []
    for offset in range(prompts):
        letters = [(10, b" a"), (11, b" b")]
        for position, (token, content) in enumerate(letters):
            changes = {"proposed_id": token, "proposed_bytes": content, "emitted_id": token, "emitted_bytes": content}
            events.append(decision(offset, position, position=position, **changes))
        source = DraftSource.LOOKUP if offset == 3 else DraftSource.MEMORY
        events += make_tree(NODES, [0.4, 0.6], begin=2, offset=offset, block=1, drafter=source)
        events.append(prompt(offset))
    return events


def test_entries_have_context_counts_and_chance(tmp_path: Path):
    with LogReader([write(tmp_path / "run", make_copied())]) as log:
        found = list_accepted(log, "memory")
    first, second = found["entries"]
    assert found["total"] == 2
    assert (first["context"], first["token"]) == ("…  a b", " 5")
    assert (first["matched"], first["judged"], first["accepted"]) == (3, 3, 3)
    assert (first["chance"], first["seen"], first["offset"]) == (0.5, 2, 2)
    assert (second["context"], second["token"]) == (" a b 5", " 7")


def test_entries_are_searched_by_context_and_token(tmp_path: Path):
    with LogReader([write(tmp_path / "run", make_copied())]) as log:
        assert [row["token"] for row in list_accepted(log, search=" B 5 7")["entries"]] == [" 7", " 7"]
        assert {row["source"] for row in list_accepted(log, search=" 5")["entries"]} == {"memory", "lookup"}
        assert [row["context"] for row in list_accepted(log, "model", " a")["entries"]] == [""]
        assert list_accepted(log, search="'%")["entries"] == []
        with pytest.raises(UsageError, match="a source must be one of"):
            list_accepted(log, "other")


def test_sources_and_lengths_have_rates(tmp_path: Path):
    with LogReader([write(tmp_path / "run", make_copied())]) as log:
        found = read_memory(log)
    sources = {row["source"]: row for row in found["sources"]}
    assert {name: (row["judged"], row["accepted"]) for name, row in sources.items()} == {
        "memory": (12, 6), "lookup": (4, 2), "model": (8, 8),
    }  # fmt: skip
    assert [(row["source"], row["matched"], row["acceptance"]) for row in found["lengths"]] == [
        ("lookup", 3, 0.5), ("memory", 3, 0.5),
    ]  # fmt: skip
    assert found["story"][0]["sentences"] == [
        "Of 16 accepted tokens, 50% came from the model, 38% from the memory (3.0 tokens of context matched), 12% from "
        "the own text (3.0 tokens of context matched)."
    ]


def held_run(folder: Path) -> Path:
    """Write a run whose last version has no folder; the version before it has a cache of two n-grams."""
    numbers = {0: None, 1: 0}
    published = [
        make_published(version=one, parent=parent, folder=f"versions/{one}") for one, parent in numbers.items()
    ]
    write(folder, [*published, *block_of_every_kind(0), prompt(0)])
    (folder / "versions/0").mkdir(parents=True)
    write_ngrams(folder / "versions/0/ngrams.parquet", [((8, 9), 80, 3), ((1, 2, 3), 81, 5)], "pair")
    return folder


def test_the_cache_of_the_last_version_is_listed(tmp_path: Path):
    folder = held_run(tmp_path / "run")
    with LogReader([folder]) as log:
        found = list_held(log, {"run": folder})
        searched = list_held(log, {"run": folder}, " CHE")
        (folder / "versions/0/ngrams.parquet").write_bytes(b"no parquet")
        damaged = list_held(log, {"run": folder})
    assert found["held"] == [{"run": "run", "target": "big", "version": 0, "entries": 2}]
    assert [(row["token"], row["uses"], row["accepted"]) for row in found["entries"]] == [
        ("#81", 5, 0),
        (" check", 3, 1),
    ]
    assert (searched["total"], searched["entries"][0]["pieces"]) == (1, [8, 9])
    assert damaged == {"entries": [], "total": 0, "held": []}


def test_pieces_are_spelt_by_the_drafter_of_a_version(tmp_path: Path):
    folder = held_run(tmp_path / "run")
    words = Tokenizer(WordLevel({"▁che": 8, "ck": 9, "[UNK]": 0}, unk_token="[UNK]"))
    with LogReader([folder]) as log:
        assert [row["spelt"] for row in list_held(log, {"run": folder})["entries"]] == [
            ["#1", "#2", "#3"],
            ["#8", "#9"],
        ]
        words.save(str(folder / "versions/0/tokenizer.json"))
        assert list_held(log, {"run": folder})["entries"][1]["spelt"] == [" che", "ck"]
        (entry,) = add_spelling([{"run": "run", "pieces": [9, 7]}], log, {"run": folder})
    assert entry["spelt"] == ["ck", "#7"]


def test_the_pages_are_searched(serve: Serve, tmp_path: Path, page: Any):
    held_run(tmp_path / "runs" / "held")
    write(tmp_path / "runs" / "copied", make_copied())
    address = serve(tmp_path / "runs")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}/memory?run=copied")
    page.wait_for_selector("#lengths .barlayer .trace")
    page.wait_for_selector("#accepted tbody tr")
    page.fill("[name=search]", "b 5 7")
    page.wait_for_selector("#shown:has-text('2 found')")
    page.select_option("[name=source]", "lookup")
    page.wait_for_selector("#shown:has-text('1 found')")
    (row,) = read_table(page, "#accepted")
    assert row[:5] == ["“ 7”", "“ a b 5”", "own text", "1", "1"]
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.goto(f"{address}/ngrams?run=held")
    page.wait_for_selector("#held tbody tr")
    assert "2 in version 0; 2 found" in page.inner_text("#held-shown")
    page.fill("[name=search]", "check")
    page.wait_for_selector("#held-shown:has-text('1 found')")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
