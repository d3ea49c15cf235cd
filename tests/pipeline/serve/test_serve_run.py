"""A server's run: its log and commits, its settings, when it can be resumed, and the weights that it then serves."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from serving_tiny import (
    HANG_SECONDS,
    OFTEN,
    RecordingListener,
    assert_sound,
    complete_all,
    load_pair,
    make_request,
    run_server,
    select,
    serve_config,
    submit_prompt,
    texts,
    wait_until,
)
from tiny_pair import TinyPair, scale_weights
from torch import Tensor

from pipeline.config.settings import Config
from pipeline.learner_service.service import read_learner_checkpoint
from pipeline.serve.run import ServerRun, derive_serving_config, make_conversation
from store.errors import ConfigError, RunError
from store.log.manifest import read_manifest

LEARNING = {"learn__spacing": "fixed", "learn__interval": 2}


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
    with run_server(config, run, keeps=True) as server:
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


def copy_unchanged(run: Path, copy: Path) -> bool:
    """Copy a run. Returns whether nothing was committed meanwhile: files of the commit before are deleted then."""
    shutil.rmtree(copy, ignore_errors=True)
    before = read_manifest(run)
    with suppress(shutil.Error):
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".lock", ".owner.json"))
        return read_manifest(run) == before == read_manifest(copy)
    return False


@pytest.mark.slow
def test_a_commit_in_the_middle_holds_whole_prompts_and_no_rows(tiny_pair: TinyPair, tmp_path: Path):
    """A copy of the folder at any time equals the run of a server that was killed then."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    config = serve_config(tiny_pair, **OFTEN)
    with run_server(config, run) as server:
        complete_all(server.engine, texts(700, 703))
        wait_until(lambda: read_manifest(run).checkpoint is not None)
        held = RecordingListener(hold=3)
        server.engine.submit(make_request(server.engine, "Ann has 3", temperature=2.0, max_tokens=90), held)
        submit_prompt(server.engine, "Tom has 4", max_tokens=1).end()
        assert held.reached.wait(HANG_SECONDS)
        wait_until(lambda: copy_unchanged(run, copy))  # the commit that is being made is the last one, while it holds
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
    pair = tiny_pair.copy_to(tmp_path)
    config = serve_config(pair)
    run = begin_run(config, tmp_path / "run")
    before = read_manifest(run)
    path = getattr(pair, which) / "model.safetensors"
    content = path.read_bytes()
    scale_weights(path.parent)
    with pytest.raises(RunError, match="must resume with the models that it began with"):
        open_server(config.with_overrides({"serve.learn": "live"}), run)
    path.write_bytes(content)
    assert read_manifest(run) == before
    assert not (run / "partitions").exists()
    open_server(config, run)  # the run is not locked


def test_a_folder_is_served_by_one_process_and_one_that_holds_a_run_by_resume_alone(
    tiny_pair: TinyPair,
    tmp_path: Path,
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

    run, config = tmp_path / "run", serve_config(tiny_pair, serve__learn="live")
    monkeypatch.setattr(ServerRun, "_start_learner", lambda *_: StubProcess())
    monkeypatch.setattr(ServerRun, "_build_engine", Mock(side_effect=ArithmeticError("no stages")))
    server = ServerRun(config, run, lambda event: None)
    with pytest.raises(ArithmeticError):
        server.__enter__()
    assert closed == [0.0]
    monkeypatch.undo()
    open_server(serve_config(tiny_pair), run)


@pytest.mark.parametrize(
    ("learn", "enabled", "learns"),
    [("live", True, True), ("idle", True, True), ("shadow", True, True), ("off", True, False), ("live", False, False)],
)
def test_learning_needs_both_settings(tiny_pair: TinyPair, learn: str, enabled: bool, learns: bool):
    config = serve_config(tiny_pair, serve__learn=learn, learn__enabled=enabled)
    assert derive_serving_config(config).learn.enabled is learns


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{% for"], ids=["missing", "no text", "no template"])
def test_an_unusable_template_is_an_error_before_serving(tiny_pair: TinyPair, tmp_path: Path, content: bytes | None):
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    config = serve_config(tiny_pair, source__chat_template=path)
    with pytest.raises(ConfigError, match="template"):
        make_conversation(config.source, load_pair(tiny_pair))


def learn_live(pair: TinyPair, run: Path) -> list[Tensor]:
    """Run a server that learns live. Returns the weights that it began with."""
    with run_server(serve_config(pair, serve__learn="live", **LEARNING), run) as server:
        base = [weight.clone() for weight in server.models.drafter.trained_weights]
        wait_until(
            lambda: bool(complete_all(server.engine, texts(700, 703)) and server.engine.read_status().drafter_version)
        )
    return base


def resume_server(pair: TinyPair, run: Path, learn: str) -> tuple[list[Tensor], tuple[int, int]]:
    """Resume a server. Returns the weights and versions that it serves before its learner can have changed them."""
    with run_server(serve_config(pair, serve__learn=learn, **LEARNING), run, resume=True) as server:
        status = server.engine.read_status()
        weights = [weight.clone() for weight in server.models.drafter.trained_weights]
        complete_all(server.engine, texts(703, 706))
    assert_sound(run)
    return weights, (status.drafter_version, status.head_version)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


@pytest.mark.slow
def test_learned_weights_are_in_service_again(tiny_pair: TinyPair, tmp_path: Path):
    run = tmp_path / "run"
    base = learn_live(tiny_pair, run)
    for learn in ("off", "shadow", "live"):
        checkpoint = read_learner_checkpoint(run)
        assert checkpoint is not None
        weights, versions = resume_server(tiny_pair, run, learn)
        assert versions == (checkpoint.weights.drafter_version, checkpoint.weights.head_version), learn
        assert equal(weights, list(checkpoint.weights.drafter)), learn
        assert not equal(weights, base)
    first, *_, last = [
        row["drafter_version"] for row in select(run, 'SELECT drafter_version FROM prompts ORDER BY "offset"')
    ]
    assert (first, last > 0) == (0, True)


@pytest.mark.slow
def test_an_idle_server_learns_from_what_it_served(tiny_pair: TinyPair, tmp_path: Path):
    """With `idle` it learns only then, and puts what it learned into service without another request."""
    run, config = tmp_path / "run", serve_config(tiny_pair, serve__learn="idle", **LEARNING)
    with run_server(config, run) as server:
        complete_all(server.engine, texts(700, 708))
        wait_until(lambda: server.engine.read_status().drafter_version > 0)
        wait_until(lambda: not server.engine.read_status().learner_lag)
        assert server.engine.read_status().learner_waits is False
    updates = select(run, "SELECT reason, waited FROM updates WHERE part = 'drafter'")
    assert all(row["reason"].startswith("idle: ") and row["waited"] == 0.0 for row in updates)
    weights, versions = resume_server(tiny_pair, run, "off")
    checkpoint = read_learner_checkpoint(run)
    assert checkpoint is not None
    assert versions[0] == checkpoint.weights.drafter_version > 0
    assert equal(weights, list(checkpoint.weights.drafter))


@pytest.mark.sweep
def test_shadow_weights_are_not_put_into_service(tiny_pair: TinyPair, tmp_path: Path):
    run = tmp_path / "run"
    with run_server(serve_config(tiny_pair, serve__learn="shadow", **LEARNING), run) as server:
        base = [weight.clone() for weight in server.models.drafter.trained_weights]
        complete_all(server.engine, texts(700, 706))
        wait_until(lambda: server.engine.read_status().learner_lag == 0)
    checkpoint = read_learner_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.weights.drafter_version > 0
    weights, versions = resume_server(tiny_pair, run, "off")
    assert versions == (0, 0)
    assert equal(weights, base)


@pytest.mark.representatives("live")
@pytest.mark.slow
@pytest.mark.parametrize("learn", ["off", "live"])
def test_offsets_resume_after_those_of_the_learner(tiny_pair: TinyPair, tmp_path: Path, learn: str):
    run = tmp_path / "run"
    learn_live(tiny_pair, run)
    checkpoint = read_learner_checkpoint(run)
    assert checkpoint is not None
    resume_server(tiny_pair, run, learn)
    offsets = [row["offset"] for row in select(run, 'SELECT "offset" FROM prompts')]
    assert len(set(offsets)) == len(offsets)
    assert max(offsets) >= checkpoint.next_offset
