"""The built-in models: what is known of them, and that those which are there load."""

from pathlib import Path

import pytest
import torch
from replaying import Command

from pipeline.models import catalog as zoo
from stages.engine.models.huggingface import load_tokenizer
from stages.vocabulary.pair import pair
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ModelError

THERE = [name for name in zoo.ZOO if (zoo.MODELS_FOLDER / name / "model.safetensors").is_file()]


def test_a_model_that_was_not_built_is_refused_with_what_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo, "MODELS_FOLDER", tmp_path)
    with pytest.raises(ModelError, match=r"benchmarks\.model_building target-7m"):
        zoo.path_of("target-7m")


@pytest.mark.parametrize("name", THERE)
def test_a_built_in_model_loads_and_writes(name: str):
    from transformers import AutoModelForCausalLM

    folder, known = zoo.path_of(name), zoo.ZOO[name]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    assert len(tokenizer) == model.config.vocab_size == known.vocabulary_size
    assert {key: getattr(model.config, key) for key in known.shape} == known.shape
    ids = torch.tensor([tokenizer("The number of").input_ids])
    assert int(ids[0, 0]) == tokenizer.bos_token_id
    assert torch.isfinite(model(ids).logits).all()
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md"}


def test_every_target_can_be_spelt_by_the_drafter():
    words = {name: Vocabulary(load_tokenizer(str(zoo.path_of(name))), name) for name in THERE}
    assert len({vocabulary.digest for vocabulary in words.values()}) == len(THERE)
    for name in THERE:
        if zoo.ZOO[name].role == "target" and "drafter-1.6m" in THERE:
            found = pair(words[name], words["drafter-1.6m"])
            assert found.unspelt == 0
            assert 0.1 < found.direct / words[name].size < 0.9, "direct maps, and n-grams too"


def test_the_commands_list_and_find_them(omnidraft: Command):
    listed = omnidraft("zoo")
    assert listed.status == 0
    assert all(f"builtin:{name}" in listed.out for name in zoo.ZOO), "whole names, in 80 columns"
    for name in THERE:
        assert Path(omnidraft("zoo", f"builtin:{name}").out.strip()) == zoo.MODELS_FOLDER / name
    unknown = omnidraft("zoo", "target-9")
    assert (unknown.status, unknown.out) == (2, "")
    assert "smollm2-135m" in unknown.err
