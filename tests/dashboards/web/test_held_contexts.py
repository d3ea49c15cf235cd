"""The contexts that the memory page lists, compared with the memory itself."""

from pathlib import Path

import numpy as np
import pytest
from event_making import make_published
from stream_making import decision, prompt, write

from dashboards.web.queries.memory import hash_contexts, list_held_contexts
from stages.drafting.costs import Costs
from stages.memory.ngram_table import context_hashes, scope_of
from stages.memory.text_memory import TextMemory, TreeLimits, write_memory
from store.query.log_reader import LogReader

TEXTS = [[5, 6, 7, 5, 6, 8], [5, 6, 7]]  # emitted tokens; the prompt is the token 9


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
