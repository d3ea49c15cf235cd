"""Attacks by a hostile version with valid digests, which prove only that nobody changed it after it was sealed."""

import json
import shutil
import struct
from pathlib import Path

import pytest
from places import ROOT
from version_making import fields

from store.errors import CorruptError, OmnidraftError
from store.registry.version_folder import open_version, seal

MODELS = ROOT / "pipeline/models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A version whose config names its own code, which creates a file when it runs."""
    source = next(path for path in sorted(MODELS.iterdir()) if "drafter" in path.name)
    shutil.copytree(source, tmp_path / "version")
    edit(tmp_path / "version", auto_map={"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"})
    return tmp_path / "version"


def edit(folder: Path, **changes: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def plant_code(folder: Path) -> Path:
    mark = folder.parent / "mark"
    code = (
        f"open({str(mark)!r}, 'w').close()\nfrom transformers import LlamaConfig as Config, LlamaForCausalLM as Model\n"
    )
    (folder / "planted.py").write_text(code)
    return mark


def test_code_next_to_the_weights_is_refused_before_anything_is_loaded(folder: Path):
    mark = plant_code(folder)
    with pytest.raises(CorruptError, match=r"planted.py may hold code"):
        seal(folder, fields())
    assert not mark.exists()


def test_code_that_a_config_names_is_not_run(folder: Path):
    from stages.engine.models.huggingface import load_causal_model

    mark = plant_code(folder)  # as if the check had missed it
    assert "planted" not in type(load_causal_model(str(folder), "float32", "cpu")).__module__
    assert not mark.exists()


def test_a_model_type_that_only_foreign_code_defines_is_refused_without_a_prompt(folder: Path, monkeypatch):
    from stages.engine.models.huggingface import load_causal_model

    monkeypatch.setattr("builtins.input", lambda *question: pytest.fail(f"prompted with {question}"))
    mark = plant_code(folder)
    edit(folder, model_type="planted")
    with pytest.raises(OmnidraftError):
        load_causal_model(str(folder), "float32", "cpu")
    assert not mark.exists()


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 70) + b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,64]}}',
        struct.pack("<Q", 52) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99]}}',
        b"",
    ],
)
def test_weights_with_a_hostile_header_raise_an_omnidraft_error(folder: Path, header: bytes):
    from stages.engine.models.huggingface import load_causal_model

    (folder / "model.safetensors").write_bytes(header)
    seal(folder, fields())
    open_version(folder)  # the digests are correct
    with pytest.raises(OmnidraftError):
        load_causal_model(str(folder), "float32", "cpu")
