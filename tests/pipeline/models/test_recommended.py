"""The sampling values with which a server greets."""

import json
from pathlib import Path

import pytest

from pipeline.models.recommended import find_sampling


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ({"do_sample": True, "top_p": 0.8, "top_k": 20}, {"top_p": 0.8, "top_k": 20}),
        ({"do_sample": True, "temperature": None, "eos_token_id": 2}, {}),
        ({"temperature": 0.7}, {}),
        (["no mapping"], {}),
    ],
)  # fmt: skip
def test_the_values_of_a_folder_are_those_of_its_makers(tmp_path: Path, written: object, found: dict[str, float]):
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert find_sampling(str(tmp_path)) == found


def test_a_pulled_model_has_the_values_of_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert find_sampling("smollm2-135m") == {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.parametrize("target", ["builtin:target-12m", "models:/some/1", "nowhere/file.gguf:x"])
def test_a_model_without_such_a_file_has_none(target: str):
    assert find_sampling(target) == {}
