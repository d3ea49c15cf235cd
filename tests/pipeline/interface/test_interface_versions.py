"""`pipeline.load_version`: what is known of a version, and its use as a model of `transformers`."""

import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch
from published_pair import Published
from tiny_pair import TinyPair

import pipeline
from store.registry.version_folder import open_version


@pytest.mark.parametrize(
    "name", [2, "2", "omnidraft-drafter/2", "models:/omnidraft-drafter/2"], ids=["int", "text", "name", "uri"]
)
def test_a_registered_version_is_described(published: Published, tiny_pair: TinyPair, name: int | str):
    version = pipeline.load_version(name, published.uri)
    manifest = open_version(published.folder(2))
    assert (version.name, version.number, version.run, version.version) == ("omnidraft-drafter", 2, "tiny", 1)
    assert (version.reference, version.uri) == ("models:/omnidraft-drafter/2", published.uri)
    assert (version.target, version.drafter) == (str(tiny_pair.target), str(tiny_pair.drafter))
    assert (version.offset, version.digest) == (manifest["offset"], manifest["digest"])
    assert version.created_at == datetime.fromisoformat(manifest["created_at"])
    assert 0 < version.metrics["acceptance"] < 1


def test_it_loads_as_a_plain_model(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (model, tokenizer), (same, _) = (
        version.load()
        for version in (pipeline.load_version(2, published.uri), pipeline.load_version(published.folder(2)))
    )
    assert list(tmp_path.iterdir()) == []
    ids_1T = tokenizer("Ann has 3 apples", return_tensors="pt").input_ids
    assert torch.equal(model(ids_1T).logits, same(ids_1T).logits)
    baseline, _ = pipeline.load_version(1, published.uri).load()
    assert not torch.equal(model(ids_1T).logits, baseline(ids_1T).logits), "it has learned"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (999, "999"),
        ("nobody/1", "nobody"),
        ("omnidraft-drafter@nobody", "an alias .*, got 'nobody'"),
        ("runs/nowhere/versions/000001", "or a folder that exists, got 'runs/nowhere/versions/000001'"),
        (-1, "must be a number"),
    ],
)
def test_versions_that_are_not_there(published: Published, name: int | str, message: str):
    with pytest.raises(pipeline.ModelError, match=message):
        pipeline.load_version(name, published.uri)


def test_a_folder_that_is_no_version_or_was_changed(published: Published, tmp_path: Path):
    with pytest.raises(pipeline.CorruptError, match=r"manifest\.json"):
        pipeline.load_version(tmp_path)
    shutil.copytree(published.folder(2), tmp_path / "copy")
    version = pipeline.load_version(tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text("{}")
    with pytest.raises(pipeline.CorruptError, match=r"config\.json was changed"):
        version.load()
