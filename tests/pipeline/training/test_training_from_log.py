"""A drafter from the log of a run: the examples are those of decoding, and the best pass becomes a version."""

import json
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from replaying import Command, config_of, run_replay, table_of
from tiny_pair import TinyPair, TinyTrio

from pipeline.assembly.models import Models, load_only_target
from pipeline.assembly.stages import make_teacher
from pipeline.run import context
from pipeline.training.logged_texts import read_run_texts
from pipeline.training.offline_run import LogTraining, encode_texts, make_training_config
from stages.contract.blocks import TrainingExample
from stages.distill import Distill
from stages.engine.models.huggingface import load_causal_model
from stages.learn.examples import teacher_forcing
from stages.learn.examples.teacher_forcing import TeacherForcing
from store.log.manifest import RunKind, read_manifest
from store.registry.version_folder import open_version

# Drafts of all sources, so that online examples are made of accepted, rejected and copied tokens.
SETTINGS = {"sampling__temperature": 0.8, "batch": 3}


@pytest.fixture(scope="module")
def run(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "logged"
    run_replay(config_of(tiny_pair, **SETTINGS), folder)
    return folder


@pytest.fixture(scope="module")
def models(tiny_pair: TinyPair, run: Path) -> Models:
    return load_only_target(config_of(tiny_pair, **SETTINGS), run)


@pytest.fixture
def online(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[int, TrainingExample]]:
    """A run, and the examples that it learned from, by offset."""
    seen: dict[int, TrainingExample] = {}
    learn = Distill.learn

    def collect(self: Distill, example: TrainingExample):
        seen[example.offset] = example
        return learn(self, example)

    monkeypatch.setattr(Distill, "learn", collect)
    run_replay(config_of(tiny_pair, **SETTINGS), tmp_path / "online")
    return tmp_path / "online", seen


@pytest.mark.slow
def test_the_examples_of_a_log_are_those_of_decoding(
    online: tuple[Path, dict[int, TrainingExample]],
    models: Models,
    tiny_pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
):
    folder, seen = online
    texts, shared, left_out = encode_texts(models, [read_run_texts(folder)])
    assert (len(texts), shared, left_out) == (20, 20, {})
    config = config_of(tiny_pair, **SETTINGS)
    teacher = make_teacher(models, config.sampling.temperature)
    forcing = TeacherForcing(models.target, models.name, teacher, models.pair.context)
    for logits in (1, 1 << 25):  # one token at a time, and whole texts
        monkeypatch.setattr(teacher_forcing, "MAX_LOGITS", logits)
        found = {example.offset: example for example in forcing.make_examples(texts)}
        assert found.keys() == seen.keys()
        for offset, decoded in seen.items():
            example = found[offset]
            assert example.pieces == decoded.pieces
            assert set(decoded.ngram_positions) <= set(example.ngram_positions)
            ours, theirs = example.soft_targets, decoded.soft_targets
            for name in ("positions", "levels"):
                assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
            np.testing.assert_allclose(np.sort(ours.probs), np.sort(theirs.probs), atol=1e-5)


@pytest.mark.slow
def test_a_training_raises_the_acceptance_and_its_version_drafts_the_same_text(
    run: Path, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(context, "Notifier", MagicMock())  # MLflow takes 15 s to begin
    config = make_training_config([run], {"learn.interval": 4})
    assert config.targets == (str(tiny_pair.target),)
    lines: list[str] = []
    summary = LogTraining(config, [run], tmp_path / "training").run(3, lines.append)
    assert (summary.texts, summary.left_out, summary.stopped) == (20, {}, False)
    assert max(summary.acceptance) > summary.acceptance[0] + 0.02
    assert 2 <= len(summary.acceptance) <= 4
    assert any(line.startswith("the target reads") for line in lines)
    assert summary.version is not None
    version = tmp_path / "training" / summary.version
    assert (open_version(version)["parent"], open_version(version)["target"]) == (0, str(tiny_pair.target))
    loaded = load_causal_model(str(tiny_pair.drafter), "float32", "cpu").state_dict()
    trained = load_causal_model(str(version), "float32", "cpu").state_dict()
    assert any(not weight.equal(loaded[name]) for name, weight in trained.items())
    updates = table_of(tmp_path / "training", "updates").to_pylist()
    assert len(updates) == summary.updates
    assert sum(row["served"] for row in updates) == summary.served
    assert read_manifest(tmp_path / "training").kind is RunKind.TRAINING
    texts = [
        [row["completion_text"] for row in table_of(folder, "prompts").sort_by("offset").to_pylist()]
        for folder in (run_with(tiny_pair, tmp_path / "before"), run_with(tiny_pair, tmp_path / "after", version))
    ]
    assert texts[0] == texts[1]


def run_with(pair: TinyPair, folder: Path, drafter: Path | None = None) -> Path:
    """A greedy run without learning."""
    run_replay(config_of(pair, learn__enabled=False, drafter=str(drafter or pair.drafter)), folder)
    return folder


def test_texts_of_another_vocabulary_are_tokenized_again(
    run: Path, tiny_trio: TinyTrio, models: Models, tmp_path: Path
):
    other = load_only_target(config_of(tiny_trio.pair, targets=(str(tiny_trio.other),)), tmp_path)
    read = read_run_texts(run)
    texts, _, left_out = encode_texts(other, [read])
    assert (len(texts), left_out) == (20, {})
    for text, completion in zip(texts, read.completions, strict=True):
        assert other.target_vocabulary.decode(text.emitted) == completion.completion
    pairs = list(zip(texts, read.completions, strict=True))
    assert sum(text.emitted != completion.emitted for text, completion in pairs) > 15, "a full stop is alike in both"
    own, _, _ = encode_texts(models, [read])
    assert [text.emitted for text in own] == [completion.emitted for completion in read.completions]


def test_the_command_trains_and_its_run_cannot_be_resumed(run: Path, tmp_path: Path, omnidraft: Command):
    options = ("--passes", 1, "--newest", 6, "--no-publish", "--run", tmp_path / "training", "--json")
    done = omnidraft("--log-level", "warning", "train", "--from-log", run, *options)
    assert done.status == 0, done.err
    summary = json.loads(done.out)
    assert (summary["texts"], summary["version"], len(summary["acceptance"])) == (6, None, 2)
    again = omnidraft("train", "--from-log", run, "--run", tmp_path / "training")
    assert again.status == 2
    assert "needs a new or empty folder" in again.err
