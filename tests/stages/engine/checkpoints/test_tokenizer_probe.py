"""Tokenizers of others are tried in a process with limits before this process loads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import TinyPair

from stages.engine.checkpoints import tokenizer_probe
from stages.engine.checkpoints.tokenizer_probe import require_bounded_tokenizer
from stages.engine.models import huggingface
from stages.engine.models.huggingface import SEAL, load_tokenizer
from store.errors import ModelError
from store.registry.version_folder import MANIFEST


def doubling(times: int) -> dict[str, Any]:
    """Replacements of a pattern that double a text each, which the growth of their contents alone does not show."""
    step = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}
    return {"type": "Sequence", "normalizers": [step] * times}


@pytest.fixture
def version(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A folder that looks like a published version."""
    folder = shutil.copytree(tiny_pair.target, tmp_path / "version")
    (folder / SEAL).write_text("{}")
    return folder


def change(folder: Path, **parts: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


def test_the_name_of_the_seal_is_that_of_versions():
    assert SEAL == MANIFEST


def test_a_plain_tokenizer_passes(version: Path):
    require_bounded_tokenizer(version / "tokenizer.json", "it")
    require_bounded_tokenizer(version / "nothing.json", "it")
    assert load_tokenizer(str(version))


BROKEN: dict[str, Callable[[], dict[str, Any]]] = {
    "many replacements": lambda: {"normalizer": doubling(40)},
    "a pattern": lambda: {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(a|a|aa)+$b"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "no tokenizer": lambda: {"model": {"type": "nothing"}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_that_takes_too_much_is_refused_in_one_line(version: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(tokenizer_probe, "MEMORY_BYTES", 1 << 29)
    change(version, **BROKEN[name]())
    with pytest.raises(ModelError, match=r"must read \d+ texts of 16,384 characters within 5 s") as caught:
        require_bounded_tokenizer(version / "tokenizer.json", "it", seconds=5.0)
    assert "\n" not in str(caught.value)


def test_models_of_a_hub_and_published_versions_are_tried(
    version: Path, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
):
    tried: list[str] = []
    monkeypatch.setattr(huggingface, "require_bounded_tokenizer", lambda path, source: tried.append(source))
    load_tokenizer(str(tiny_pair.target))
    assert tried == [], "a folder is the user's own"
    load_tokenizer(str(version))
    assert tried == [str(version)]
    assert huggingface.is_foreign("somebody/model")
