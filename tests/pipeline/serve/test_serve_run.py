"""A server's run: its log and commits, and when it can be resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from serving_tiny import (
    HANG_SECONDS,
    OFTEN,
    RecordingListener,
    assert_sound,
    complete_all,
    make_request,
    run_server,
    select,
    serve_config,
    submit_prompt,
    texts,
)
from tiny_pair import TinyPair

from pipeline.config.settings import Config
from pipeline.serve.messages import BusyError, Finish
from pipeline.serve.run import ServerRun
from store.errors import RunError
from store.log.manifest import read_manifest


def begin_run(config: Config, run: Path, prompts: int = 3) -> Path:
    """Make a run with so many completed prompts."""
    with run_server(config, run) as server:
        complete_all(server.engine, texts(700, 700 + prompts))
    return run


def open_server(config: Config, run: Path, *, resume: bool = True) -> None:
    with run_server(config, run, resume=resume):
        pass


@pytest.mark.slow
def test_a_run_resumes_where_it_ended(tiny_pair: TinyPair, tmp_path: Path):
    """Offsets, the n-gram cache and the time of the run continue in one log."""
    config = serve_config(tiny_pair)
    run = tmp_path / "run"
    with run_server(config, run) as server:
        complete_all(server.engine, texts(700, 704), temperature=1.5)
        cache = server.engine._runner.stages.translate.cache_version
    assert cache > 0
    with run_server(config, run, resume=True) as server:
        assert server.engine._runner.stages.translate.cache_version == cache
        submit_prompt(server.engine, "Tom has 4").end()
    (vocabularies,) = json.loads((run / "vocabulary.json").read_text())
    assert (vocabularies["target"], vocabularies["drafter"]) == (config.targets[0], config.drafter)
    assert vocabularies["target_size"] >= vocabularies["direct"] > 0
    rows = select(run, 'SELECT "offset", prompt_text, started, finished FROM prompts ORDER BY "offset"')
    assert [row["offset"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["prompt_text"] == "Tom has 4"
    assert rows[-1]["started"] >= max(row["finished"] for row in rows[:-1])
    assert_sound(run)


@pytest.mark.constants(serve_grace=0.0)
def test_shutdown_ends_running_requests_after_the_grace_time(tiny_pair: TinyPair, tmp_path: Path):
    run = tmp_path / "run"
    with run_server(serve_config(tiny_pair, batch=1), run) as server:
        engine = server.engine
        flying, waiting = (
            submit_prompt(engine, "Ann has 3", max_tokens=900, temperature=2.0),
            submit_prompt(engine, "Tom has 4"),
        )
    assert {flying.finish, waiting.finish} <= {Finish.CANCELLED, Finish.STOP}
    with pytest.raises(BusyError):
        submit_prompt(engine, "Ida has 5")
    assert not engine.read_status().ready
    assert_sound(run)


@pytest.mark.slow
def test_a_commit_in_the_middle_holds_whole_prompts_and_no_rows(tiny_pair: TinyPair, tmp_path: Path):
    """A copy of the folder at any time equals the run of a server that was killed then."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    config = serve_config(tiny_pair, **OFTEN)
    with run_server(config, run) as server:
        complete_all(server.engine, texts(700, 703))
        held = RecordingListener(hold=3)
        server.engine.submit(make_request(server.engine, "Ann has 3", temperature=2.0, max_tokens=90), held)
        submit_prompt(server.engine, "Tom has 4", max_tokens=1).end()
        assert held.reached.wait(HANG_SECONDS)
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".lock", ".owner.json"))
        held.go.set()
    manifest = read_manifest(copy)
    assert manifest.checkpoint
    state = json.loads((copy / manifest.checkpoint.folder / "state.json").read_text())
    assert state["rows"] == []
    assert_sound(copy)
    offsets = {row["offset"] for row in select(copy, 'SELECT "offset" FROM prompts')}
    assert {row["offset"] for row in select(copy, 'SELECT "offset" FROM decisions')} == offsets
    with run_server(config, copy, resume=True) as server:
        submit_prompt(server.engine, "Ida has 5").end()
    assert_sound(copy)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_other_models_are_refused_before_anything_is_written(tiny_pair: TinyPair, tmp_path: Path, which: str):
    """Models with the same sizes and vocabularies but other weights. No learner starts."""
    config = serve_config(tiny_pair)
    run = begin_run(config, tmp_path / "run")
    before = read_manifest(run)
    path = getattr(tiny_pair, which) / "model.safetensors"
    content, weights = path.read_bytes(), load_file(path)
    try:
        save_file({name: weight * 1.01 for name, weight in weights.items()}, path, metadata={"format": "pt"})
        with pytest.raises(RunError, match="must resume with the models that it began with"):
            open_server(config.with_overrides({"serve.learn": "live"}), run)
    finally:
        path.write_bytes(content)
    assert read_manifest(run) == before
    assert not (run / "partitions").exists()
    open_server(config, run)  # the run is not locked


def test_a_folder_is_served_by_one_process_and_one_that_holds_a_run_by_resume_alone(
    tiny_pair: TinyPair, tmp_path: Path
):
    config = serve_config(tiny_pair)
    run = tmp_path / "run"
    with run_server(config, run), pytest.raises(RunError, match="must not be written by two processes"):
        open_server(config, run)
    with pytest.raises(RunError, match="holds a run that is not finished"):
        open_server(config, run, resume=False)
    with pytest.raises(RunError, match="must hold the run of a server"):
        open_server(config, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_failed_start_releases_everything(tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lock is free again, and the learner is closed."""
    closed = []

    class StubProcess:
        def close(self, timeout: float) -> None:
            closed.append(timeout)

    def raise_error(*_: Any) -> None:
        raise ArithmeticError("no stages")

    run, config = tmp_path / "run", serve_config(tiny_pair, serve__learn="live")
    monkeypatch.setattr(ServerRun, "_start_learner", lambda *_: StubProcess())
    monkeypatch.setattr(ServerRun, "_build_engine", raise_error)
    server = ServerRun(config, run, lambda event: None)
    with pytest.raises(ArithmeticError):
        server.__enter__()
    assert closed == [0.0]
    monkeypatch.undo()
    open_server(serve_config(tiny_pair), run)
