"""A server's run: what is kept of it, what it goes on from, and what it refuses to go on from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from replaying import config_of, replayed
from safetensors.torch import load_file, save_file
from serving_tiny import (
    OFTEN,
    PATIENCE,
    Told,
    ask_of,
    asked,
    assert_sound,
    select,
    serve_config,
    served_all,
    serving,
    texts,
)
from tiny_pair import TinyPair, tiny_pair  # noqa: F401  (a fixture)

from pipeline import serve_run
from pipeline.config import Config, load
from pipeline.serve_requests import BusyError, Finish
from pipeline.serve_run import Serving
from store.errors import RunError
from store.manifest import read_manifest


def began(config: Config, run: Path, prompts: int = 3) -> Path:
    """A run with so many completed prompts."""
    with serving(config, run) as server:
        served_all(server.engine, texts(700, 700 + prompts))
    return run


def begin_or_go_on(config: Config, run: Path, *, resume: bool = True) -> None:
    with serving(config, run, resume=resume):
        pass


def test_a_run_goes_on_where_it_ended(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    """Offsets, the cache of n-grams and the time of the run; the log is one."""
    config = serve_config(tiny_pair)
    run = tmp_path / "run"
    with serving(config, run) as server:
        served_all(server.engine, texts(700, 704), temperature=1.5)
        cache = server.engine._lane.stages.translate.cache_version
    assert cache > 0
    with serving(config, run, resume=True) as server:
        assert server.engine._lane.stages.translate.cache_version == cache
        asked(server.engine, "Tom has 4").end()
    rows = select(run, 'SELECT "offset", prompt_text, started, finished FROM prompts ORDER BY "offset"')
    assert [row["offset"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["prompt_text"] == "Tom has 4"
    assert rows[-1]["started"] >= max(row["finished"] for row in rows[:-1])
    assert_sound(run)


def test_what_ends_early_is_logged_as_far_as_it_came(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    run = tmp_path / "run"
    with serving(serve_config(tiny_pair), run) as server:
        held = Told(hold=2)
        cancel = server.engine.submit(ask_of(server.engine, "Ann has 3", name="left", max_new_tokens=90), held)
        assert held.reached.wait(PATIENCE)
        cancel()
        held.go.set()
        emitted = held.end().usage.emitted
    (row,) = select(run, "SELECT prompt_id, finish, emitted, blocks, completion_text FROM prompts")
    assert row == {
        "prompt_id": "left",
        "finish": "cancelled",
        "emitted": emitted,
        "blocks": 2,
        "completion_text": held.text,
    }
    assert_sound(run)


def test_leaving_ends_what_is_in_flight_when_the_grace_is_over(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    run = tmp_path / "run"
    with serving(serve_config(tiny_pair, serve__grace_seconds=0.0, batch=1), run) as server:
        engine = server.engine
        flying, waiting = asked(engine, "Ann has 3", max_new_tokens=900, temperature=2.0), asked(engine, "Tom has 4")
    assert {flying.finish, waiting.finish} <= {Finish.CANCELLED, Finish.STOP}
    with pytest.raises(BusyError):
        asked(engine, "Ida has 5")
    assert not engine.figures().ready
    assert_sound(run)


def test_a_commit_in_the_middle_holds_whole_prompts_and_no_rows(tiny_pair: TinyPair, tmp_path: Path):  # noqa: F811
    """A copy of the folder at any time is the run of a server that was killed then."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    config = serve_config(tiny_pair, **OFTEN)
    with serving(config, run) as server:
        served_all(server.engine, texts(700, 703))
        held = Told(hold=3)
        server.engine.submit(ask_of(server.engine, "Ann has 3", temperature=2.0, max_new_tokens=90), held)
        asked(server.engine, "Tom has 4", max_new_tokens=1).end()
        assert held.reached.wait(PATIENCE)
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".lock", ".owner.json"))
        held.go.set()
    manifest = read_manifest(copy)
    assert manifest.checkpoint
    state = json.loads((copy / manifest.checkpoint.folder / "state.json").read_text())
    assert state["rows"] == []
    assert_sound(copy)
    offsets = {row["offset"] for row in select(copy, 'SELECT "offset" FROM prompts')}
    assert {row["offset"] for row in select(copy, 'SELECT "offset" FROM decisions')} == offsets
    with serving(config, copy, resume=True) as server:
        asked(server.engine, "Ida has 5").end()
    assert_sound(copy)


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_other_models_are_refused_before_anything_is_written(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    which: str,
):
    """The same sizes and vocabularies, other numbers. No learner begins."""
    config = serve_config(tiny_pair)
    run = began(config, tmp_path / "run")
    before = read_manifest(run)
    path = getattr(tiny_pair, which) / "model.safetensors"
    content, weights = path.read_bytes(), load_file(path)
    try:
        save_file({name: weight * 1.01 for name, weight in weights.items()}, path, metadata={"format": "pt"})
        with pytest.raises(RunError, match="must go on with the models that it began with"):
            begin_or_go_on(config.with_overrides({"serve.learn": "live"}), run)
    finally:
        path.write_bytes(content)
    assert read_manifest(run) == before
    assert not (run / "partitions").exists()
    begin_or_go_on(config, run)  # nothing of it holds the run


def test_a_replay_is_no_run_of_a_server(tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    run = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        _broken_replay(tiny_pair, run, monkeypatch)
    assert read_manifest(run).checkpoint
    with pytest.raises(RunError, match="omnidraft replay --resume"):
        begin_or_go_on(serve_config(tiny_pair), run)


def _broken_replay(pair: TinyPair, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not finished."""
    from pipeline.loop import Lane

    leave, ended = Lane._finish, []

    def breaks(lane: Any, row: Any) -> Any:
        ended.append(row)
        if len(ended) == 6:
            raise ZeroDivisionError
        return leave(lane, row)

    monkeypatch.setattr(Lane, "_finish", breaks)
    try:
        replayed(config_of(pair, **OFTEN, commit__prompts=1), run)
    finally:
        monkeypatch.undo()


def test_a_folder_is_served_by_one_process_and_one_that_holds_a_run_by_resume_alone(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
):
    config = serve_config(tiny_pair)
    run = tmp_path / "run"
    with serving(config, run), pytest.raises(RunError, match="must not be written by two processes"):
        begin_or_go_on(config, run)
    with pytest.raises(RunError, match="holds a run that is not finished"):
        begin_or_go_on(config, run, resume=False)
    with pytest.raises(RunError, match="must hold the run of a server"):
        begin_or_go_on(config, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_what_cannot_begin_leaves_nothing_held(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The lock is free again, and no learner lives on."""
    closed = []

    class Link:
        def close(self, timeout: float) -> None:
            closed.append(timeout)

    def breaks(*_: Any) -> None:
        raise ArithmeticError("no stages")

    run, config = tmp_path / "run", serve_config(tiny_pair)
    monkeypatch.setattr(serve_run, "learner_of", lambda *_: Link())
    monkeypatch.setattr(serve_run, "build_engine", breaks)
    server = Serving(config, run, lambda event: None, lambda told: None)
    with pytest.raises(ArithmeticError):
        server.__enter__()
    assert closed == [0.0]
    monkeypatch.undo()
    begin_or_go_on(config, run)


def test_a_server_that_did_not_learn_may_learn_when_it_goes_on(
    tiny_pair: TinyPair,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """What is kept of the settings is what was said, not what came of it."""
    run = began(serve_config(tiny_pair, serve__learn="off"), tmp_path / "run")
    learns = []
    monkeypatch.setattr(serve_run, "learner_of", lambda config, *_: learns.append(config.learn.enabled))
    kept = load(run / "config.json")
    begin_or_go_on(kept, run)
    begin_or_go_on(kept.with_overrides({"serve.learn": "live"}), run)
    assert learns == [False, True]
