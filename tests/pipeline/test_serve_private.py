"""`"store": false`: nothing of what was asked and answered is kept, while it is decoded or after."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from serving_tiny import OFTEN, PATIENCE, Told, ask_of, asked, assert_sound, select, serve_config, serving, until
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline.coach import Finished, WatchingCoach
from pipeline.serve_run import Serving
from stages.snapshot import STATE
from store.manifest import read_manifest

SECRET = "Zoë keeps 7391 violets"
PUBLIC = "Ann has 3 apples and"


class NotingCoach(WatchingCoach):
    """Keeps what is posted to it."""

    def __init__(self, coach: WatchingCoach) -> None:
        vars(self).update(vars(coach))
        self.posted: list[Finished] = []

    def completed(self, finished: Finished) -> Iterator[Any]:
        self.posted.append(finished)
        return super().completed(finished)


@pytest.fixture
def server(tiny_pair: TinyPair, tmp_path: Path) -> Iterator[Serving]:  # noqa: F811
    with serving(serve_config(tiny_pair, **OFTEN), tmp_path / "run") as server:
        yield server


def spelt(ids: Sequence[int]) -> list[bytes]:
    """How a file could hold these ids."""
    return [np.array(ids, kind).tobytes() for kind in ("<i2", "<i4", "<i8", "<f4")] + [
        separator.join(map(str, ids)).encode() for separator in (",", ", ")
    ]


def traces(run: Path, needles: Sequence[bytes]) -> list[str]:
    """Files below the run with any of these in them, Parquet files unpacked."""
    found = []
    for path in (path for path in run.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += repr(parquet.read_table(path, partitioning=None).to_pylist()).encode()
        found += [f"{path.name}: {needle!r}" for needle in needles if needle in content]
    return found


def needles_of(server: Serving, text: str, emitted: Sequence[int]) -> list[bytes]:
    """The prompt's characteristic part, and what was answered."""
    prompt = server.engine.encode(text)
    ids = [prompt.tokens[-6:], prompt.pieces[-6:], *([tuple(emitted[:6])] if emitted else [])]
    return [text[5:].encode(), *(needle for some in ids for needle in spelt(some))]


def test_what_is_sought_would_be_found(server: Serving, tmp_path: Path):
    """The same prompt, to be stored: its texts and ids are in the log."""
    told = asked(server.engine, SECRET).end()
    until(lambda: bool(read_manifest(tmp_path / "run").tables["prompts"]))
    found = " ".join(traces(tmp_path / "run", needles_of(server, SECRET, told.tokens)))
    assert "7391" in found
    rows = select(tmp_path / "run", "SELECT emitted_id FROM decisions WHERE emitted_id IS NOT NULL")
    assert tuple(row["emitted_id"] for row in rows) == told.tokens


def test_nothing_is_kept_of_what_is_not_to_be_stored(server: Serving, tmp_path: Path):
    run, engine = tmp_path / "run", server.engine
    lane = engine._lane
    lane.coach = coach = NotingCoach(lane.coach)
    engine._desk._teaches = lambda: True  # as if a learner waited for lessons
    held = Told(hold=3)
    engine.submit(ask_of(engine, SECRET, store=False, name="private", temperature=1.0, max_new_tokens=40), held)
    assert held.reached.wait(PATIENCE)
    public = asked(engine, PUBLIC, name="public", max_new_tokens=2)
    held.go.set()
    public.end()
    assert held.end().usage.emitted > 6
    until(lambda: _has(run, "private"))
    assert traces(run, needles_of(server, SECRET, held.tokens)) == []
    rows = {row["prompt_id"]: row for row in select(run, "SELECT * FROM prompts")}
    assert (rows["private"]["prompt_text"], rows["private"]["completion_text"]) == ("", "")
    assert rows["private"]["emitted"] == held.usage.emitted, "counts are kept"
    assert {row["prompt_id"] for row in select(run, "SELECT DISTINCT prompt_id FROM decisions")} == {"public"}
    posted = {finished.prompt.prompt_id: finished for finished in coach.posted}
    assert posted["private"].lesson is None
    assert posted["private"].emitted == ()
    assert posted["public"].lesson is not None
    assert_sound(run)


def _has(run: Path, prompt: str) -> bool:
    return bool(select(run, f"SELECT 1 FROM prompts WHERE prompt_id = '{prompt}'"))


def test_a_checkpoint_that_is_made_while_it_is_decoded_holds_nothing_of_it(server: Serving, tmp_path: Path):
    """The engine is held in the middle of the private ask, with a checkpoint of the block before behind it."""
    run, engine = tmp_path / "run", server.engine
    asked(engine, PUBLIC).end()
    until(lambda: not engine._dirty)
    engine._committer.is_due = lambda: True  # after every block that completes something
    gate, held = Told(hold=1), Told(hold=5)
    asked(engine, PUBLIC, gate, max_new_tokens=60)
    assert gate.reached.wait(PATIENCE)  # the next two are taken together
    gate.hold = None
    engine.submit(ask_of(engine, SECRET, store=False, temperature=1.5, max_new_tokens=60), held)
    beside = asked(engine, PUBLIC, max_new_tokens=1)  # completes at once: there is something to commit
    gate.go.set()
    assert held.reached.wait(PATIENCE)
    assert beside.ended.is_set()
    until(lambda: _offset_kept(run) == 4, "no checkpoint was made beside it")
    tokens = [token for chunk in held.chunks for token in chunk.tokens]
    assert traces(run, needles_of(server, SECRET, tokens)) == []
    held.go.set()
    held.end()


def _offset_kept(run: Path) -> int:
    """The next offset by the last checkpoint: all before it were taken by then."""
    checkpoint = read_manifest(run).checkpoint
    assert checkpoint is not None
    return int(json.loads((run / checkpoint.folder / STATE).read_text())["state"]["offset"])


def test_the_ngram_cache_gets_none_of_it(server: Serving):
    lane = server.engine._lane
    asked(server.engine, PUBLIC, store=False, temperature=1.5, max_new_tokens=60).end()
    assert (lane.stages.translate.cache_version, list(lane.stages.translate.cache.entries())) == (0, [])
    asked(server.engine, PUBLIC, temperature=1.5, max_new_tokens=60).end()
    assert lane.stages.translate.cache_version > 0, "it would have"


def test_a_run_without_texts_keeps_ids_alone(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    run = tmp_path / "run"
    with serving(serve_config(tiny_pair, log__text=False), run) as server:
        told = asked(server.engine, SECRET).end()
    assert traces(run, [SECRET[5:].encode(), told.text.encode()]) == []
    rows = select(run, "SELECT emitted_id FROM decisions WHERE emitted_id IS NOT NULL")
    assert tuple(row["emitted_id"] for row in rows) == told.tokens
