"""Accepted tokens, contexts that are held, and entries of the n-gram cache, from synthetic logs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_making import make_published
from serving_runs import Serve, read_table
from stream_making import block_of_every_kind, decision, prompt, write
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tree_making import NODES, make_tree

from dashboards.web.queries.held import add_spelling, hash_contexts, list_held_contexts, list_held_ngrams
from dashboards.web.queries.memory import list_accepted, read_memory
from stages.drafting.costs import Costs
from stages.memory.ngram_table import context_hashes, scope_of
from stages.memory.text_memory import TextMemory, TreeLimits, write_memory
from store.errors import UsageError
from store.events import DraftSource, Event
from store.query.log_reader import LogReader
from store.registry.ngram_file import write_ngrams

TEXTS = [[5, 6, 7, 5, 6, 8], [5, 6, 7]]  # emitted tokens; the prompt is the token 9


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
        found = list_held_ngrams(log, {"run": folder})
        searched = list_held_ngrams(log, {"run": folder}, " CHE")
        (folder / "versions/0/ngrams.parquet").write_bytes(b"no parquet")
        damaged = list_held_ngrams(log, {"run": folder})
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
        assert [row["spelt"] for row in list_held_ngrams(log, {"run": folder})["entries"]] == [
            ["#1", "#2", "#3"],
            ["#8", "#9"],
        ]
        words.save(str(folder / "versions/0/tokenizer.json"))
        assert list_held_ngrams(log, {"run": folder})["entries"][1]["spelt"] == [" che", "ck"]
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


def spelling(token: int) -> bytes:
    return f" {chr(ord('a') + token)}".encode()


def make_run(folder: Path, texts: list[list[int]] = TEXTS) -> Path:
    """Write a log of emitted tokens with a version whose folder is `versions/000000`."""
    events = []
    for offset, tokens in enumerate(texts):
        for place, token in enumerate(tokens):
            changes = {"emitted_id": token, "emitted_bytes": spelling(token)}
            events.append(decision(offset, place, position=place, **changes))
        events.append(prompt(offset))
    return write(folder, [*events, make_published(target="big", version=0, folder="versions/000000")])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run")
    costs = Costs(((1, 1.0), (2, 1.0)), ((1, 0.1),))
    memory = TextMemory(costs, TreeLimits(8, 2, 4), frozenset(), own=True, budget_bytes=1 << 16)
    assert memory.table is not None
    for tokens in TEXTS:
        memory.table.learn([9, *tokens], begin=1)
    memory.table.learn([1, 2, 3], begin=1, scope=scope_of("somebody"))
    (folder / "versions/000000").mkdir(parents=True)
    write_memory(folder / "versions/000000/memory.safetensors", memory, "ab")
    return folder


def list_contexts(run: Path, search: str = "") -> dict:
    with LogReader([run]) as log:
        return list_held_contexts(log, {run.name: run}, search)


def test_hashes_are_those_of_the_memory():
    tokens = np.array([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 2**31 - 1, 3], np.int32)
    starts = np.array([0] * 10 + [10] * 2)
    found = {(place, length): value for length, (places, values) in enumerate(hash_contexts(tokens, starts), 1)
             for place, value in zip(places.tolist(), values.tolist(), strict=True)}  # fmt: skip
    for place, start in enumerate(starts.tolist()):
        expected = list(context_hashes(tokens[start : place + 1].tolist()))
        assert [found.pop((place, length)) for length in range(1, len(expected) + 1)] == expected
    assert found == {}


def test_contexts_have_their_spelling_and_what_followed(run: Path):
    found = list_contexts(run)
    assert found["total"] == 18, "12 of the emitted tokens alone, 6 that begin with the prompt's"
    assert found["held"] == [{
        "run": "run", "target": "big", "contexts": 18, "spelt": 12, "texts": 3, "version": 0,
    }]  # fmt: skip
    by_context = {entry["context"]: entry for entry in found["entries"]}
    assert by_context[" f"]["seen"] == 3
    assert by_context[" f"]["followed"] == [(" g", 3)]
    assert (by_context[" f g"]["seen"], by_context[" f g"]["length"]) == (3, 2)
    assert sorted(by_context[" f g"]["followed"]) == [(" h", 2), (" i", 1)]
    assert [entry["seen"] for entry in found["entries"]] == sorted((e["seen"] for e in found["entries"]), reverse=True)
    assert None in by_context, "contexts that begin with the prompt's token were not emitted"


def test_contexts_of_a_tenant_are_not_listed(run: Path):
    assert all(text not in (" c", " d") for entry in list_contexts(run)["entries"] for text, _ in entry["followed"])


def test_entries_are_searched_across_context_and_continuation(run: Path):
    contexts = {entry["context"] for entry in list_contexts(run, " F G H")["entries"]}
    assert contexts == {" f g", " f g h", " f g h f", " f g h f g"}, "the first is continued by the last token"
    assert list_contexts(run, "'%")["entries"] == []
    (run / "versions/000000/memory.safetensors").write_bytes(b"no tensors")
    assert list_contexts(run) == {"entries": [], "total": 0, "held": []}
