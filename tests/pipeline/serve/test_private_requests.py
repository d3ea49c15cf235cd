"""Private requests (`"store": false`): no file holds their text, neither during decoding nor after."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from serving_tiny import (
    HANG_SECONDS,
    OFTEN,
    RecordingListener,
    assert_sound,
    make_request,
    run_server,
    select,
    serve_config,
    submit_prompt,
    wait_until,
)
from tiny_pair import TinyPair

from pipeline.learner_protocol import CompletedPrompt
from pipeline.learning.local_learner import NoLearner
from pipeline.serve.run import ServerRun
from stages.contract.snapshot import STATE
from store.log.manifest import read_manifest

SECRET = "Zoë keeps 7391 violets"
PUBLIC = "Ann has 3 apples and"
DISTINCT = 5.0  # temperature of private text, which must not be that of a public request by chance


class NotingLearner(NoLearner):
    """A learner that records completed prompts."""

    def __init__(self, learner: NoLearner) -> None:
        vars(self).update(vars(learner))
        self.posted: list[CompletedPrompt] = []

    def on_prompt_completed(self, finished: CompletedPrompt) -> Iterator[Any]:
        self.posted.append(finished)
        return super().on_prompt_completed(finished)


@pytest.fixture
def server(tiny_pair: TinyPair, tmp_path: Path) -> Iterator[ServerRun]:
    with run_server(serve_config(tiny_pair, **OFTEN), tmp_path / "run") as server:
        yield server


def encode_ids(ids: Sequence[int]) -> list[bytes]:
    """Encodings in which a file could hold these ids."""
    return [np.array(ids, kind).tobytes() for kind in ("<i2", "<i4", "<i8", "<f4")] + [
        separator.join(map(str, ids)).encode() for separator in (",", ", ")
    ]


def traces(run: Path, needles: Sequence[bytes]) -> list[str]:
    """List the files of the run that contain any of these, Parquet files unpacked."""
    found = []
    for path in (path for path in run.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += repr(parquet.read_table(path, partitioning=None).to_pylist()).encode()
        found += [f"{path.name}: {needle!r}" for needle in needles if needle in content]
    return found


def needles_of(server: ServerRun, text: str, emitted: Sequence[int]) -> list[bytes]:
    """Return the characteristic part of the prompt, and the completion, as text and as ids."""
    prompt = server.engine.encode(text)
    ids = [prompt.tokens[-6:], prompt.pieces[-6:], *([tuple(emitted[:6])] if emitted else [])]
    return [text[5:].encode(), *(needle for some in ids for needle in encode_ids(some))]


def test_a_stored_request_is_found(server: ServerRun, tmp_path: Path):
    """The same prompt without `store: false`: its texts and ids are in the log."""
    listener = submit_prompt(server.engine, SECRET).end()
    wait_until(lambda: bool(read_manifest(tmp_path / "run").tables["prompts"]))
    found = " ".join(traces(tmp_path / "run", needles_of(server, SECRET, listener.tokens)))
    assert "7391" in found
    rows = select(tmp_path / "run", "SELECT emitted_id FROM decisions WHERE emitted_id IS NOT NULL")
    assert tuple(row["emitted_id"] for row in rows) == listener.tokens


@pytest.mark.slow
def test_no_file_holds_a_private_request(server: ServerRun, tmp_path: Path):
    run, engine = tmp_path / "run", server.engine
    runner = engine._runner
    runner.learner = learner = NotingLearner(runner.learner)
    engine._queue._learner_accepts_examples = lambda: True  # as if a learner waited for examples
    held = RecordingListener(hold=3)
    engine.submit(
        make_request(engine, SECRET, store=False, request_id="private", temperature=DISTINCT, max_tokens=40),
        held,
    )
    assert held.reached.wait(HANG_SECONDS)
    public = submit_prompt(engine, PUBLIC, request_id="public", max_tokens=2)
    held.go.set()
    public.end()
    assert held.end().usage.emitted > 6
    wait_until(lambda: select(run, "SELECT 1 FROM prompts WHERE prompt_id = 'private'") != [])
    assert traces(run, needles_of(server, SECRET, held.tokens)) == []
    rows = {row["prompt_id"]: row for row in select(run, "SELECT * FROM prompts")}
    assert (rows["private"]["prompt_text"], rows["private"]["completion_text"]) == ("", "")
    assert rows["private"]["emitted"] == held.usage.emitted, "counts are kept"
    assert {row["prompt_id"] for row in select(run, "SELECT DISTINCT prompt_id FROM decisions")} == {"public"}
    posted = {finished.prompt.prompt_id: finished for finished in learner.posted}
    assert posted["private"].example is None
    assert posted["private"].emitted == ()
    assert posted["public"].example is not None
    assert_sound(run)


def test_a_checkpoint_during_a_private_request_holds_nothing_of_it(server: ServerRun, tmp_path: Path):
    """The engine is held during the private request, after a checkpoint of the block before."""
    run, engine = tmp_path / "run", server.engine
    submit_prompt(engine, PUBLIC).end()
    wait_until(lambda: not engine._events.dirty)
    engine._committer.is_due = lambda: True  # after every block that completes something
    gate, held = RecordingListener(hold=1), RecordingListener(hold=2)
    submit_prompt(engine, PUBLIC, gate, max_tokens=60)
    assert gate.reached.wait(HANG_SECONDS)  # the next two are taken together
    gate.hold = None
    engine.submit(make_request(engine, SECRET, store=False, temperature=DISTINCT, max_tokens=60), held)
    other = submit_prompt(engine, PUBLIC, max_tokens=1)  # completes at once: there is something to commit
    gate.go.set()
    assert held.reached.wait(HANG_SECONDS)
    assert other.ended.is_set()
    wait_until(lambda: _offset_kept(run) == 4, "no checkpoint was made meanwhile")
    tokens = [token for chunk in held.chunks for token in chunk.tokens]
    assert traces(run, needles_of(server, SECRET, tokens)) == []
    held.go.set()
    held.end()


def _offset_kept(run: Path) -> int:
    """Return the next offset of the last checkpoint: all prompts before it had been admitted."""
    checkpoint = read_manifest(run).checkpoint
    assert checkpoint is not None
    return int(json.loads((run / checkpoint.folder / STATE).read_text())["state"]["offset"])


def test_the_ngram_cache_ignores_private_requests(server: ServerRun, monkeypatch: pytest.MonkeyPatch):
    runner = server.engine._runner
    monkeypatch.setattr(runner.stages.translate, "_keeps", True)  # as on a server that learns
    submit_prompt(server.engine, PUBLIC, store=False, temperature=DISTINCT, max_tokens=60).end()
    assert (runner.stages.translate.cache_version, list(runner.stages.translate.cache.entries())) == (0, [])
    submit_prompt(server.engine, PUBLIC, temperature=DISTINCT, max_tokens=60).end()
    assert runner.stages.translate.cache_version > 0, "it would have"
