"""The built-in models: what is known of them, that those which are there load, and how one is made."""

import json
import re
from pathlib import Path

import pytest
import torch
from replaying import Command, omnidraft  # noqa: F401  (a fixture)
from tiny_pair import sentences, tiny_model

from pipeline import zoo
from stages.huggingface import load_tokenizer
from stages.pair import pair
from stages.pretrain import Report
from stages.vocabulary import Vocabulary
from store.errors import ModelError

MEGABYTES_TOGETHER = 48
THERE = [name for name in zoo.ZOO if (zoo.MODELS_FOLDER / name / "model.safetensors").is_file()]


def test_there_are_one_drafter_and_two_targets_of_different_vocabularies():
    assert [model.role for model in zoo.ZOO.values()] == ["drafter", "target", "target"]
    assert len({(model.vocabulary_size, model.split) for model in zoo.ZOO.values()}) == 3
    assert all(name == model.name for name, model in zoo.ZOO.items())


def test_the_drafter_has_something_to_learn():
    """It knows little of the streams' texts, its targets all of their kind."""
    drafter, *targets = zoo.ZOO.values()
    assert not {"gsm8k", "mbpp"} & drafter.texts.keys()
    assert drafter.texts["functions"] < 0.1
    for target in targets:
        assert {"gsm8k", "mbpp", "functions", "documentation"} <= {n for n, share in target.texts.items() if share == 1}


@pytest.mark.parametrize("name", ["drafter", "target-7", "", "../models"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str):
    with pytest.raises(ModelError, match=r"drafter-1\.6m, target-7m, target-12m"):
        zoo.path_of(name)
    with pytest.raises(ModelError):
        zoo.chosen([name], None)


def test_a_model_that_was_not_built_is_refused_with_what_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo, "MODELS_FOLDER", tmp_path)
    with pytest.raises(ModelError, match="omnidraft zoo build target-7m"):
        zoo.path_of("target-7m")


def test_names_are_chosen_with_or_without_builtin_and_with_other_steps():
    (model,) = zoo.chosen(["builtin:target-7m"], 3)
    assert (model.name, model.recipe.steps) == ("target-7m", 3)
    (model,) = zoo.chosen(["target-7m"], None)
    assert model == zoo.ZOO["target-7m"]


def test_the_models_are_small_together():
    files = [path for name in THERE for path in (zoo.MODELS_FOLDER / name).iterdir()]
    assert sum(path.stat().st_size for path in files) < MEGABYTES_TOGETHER * 1e6


@pytest.mark.parametrize("name", THERE)
def test_a_built_in_model_loads_and_writes(name: str):
    from transformers import AutoModelForCausalLM

    folder, recipe = zoo.path_of(name), zoo.ZOO[name]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    assert len(tokenizer) == model.config.vocab_size == recipe.vocabulary_size
    assert {key: getattr(model.config, key) for key in recipe.shape} == recipe.shape
    ids = torch.tensor([tokenizer("The number of").input_ids])
    assert int(ids[0, 0]) == tokenizer.bos_token_id
    assert torch.isfinite(model(ids).logits).all()
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md"}


@pytest.mark.parametrize("name", THERE)
def test_a_model_card_says_how_good_it_is(name: str):
    card = (zoo.path_of(name) / "README.md").read_text(encoding="utf-8")
    found = re.search(r"\*\*(\d\.\d{3})\*\* on held-out documents", card)
    assert found, "the validation loss"
    assert 0.5 < float(found[1]) < 6.0
    assert f"omnidraft zoo build {name}" in card
    assert card.count("```text") == len(zoo.SAMPLE_PROMPTS)


def test_every_target_can_be_spelt_by_the_drafter():
    words = {name: Vocabulary(load_tokenizer(str(zoo.path_of(name))), name) for name in THERE}
    assert len({vocabulary.digest for vocabulary in words.values()}) == len(THERE)
    for name in THERE:
        if zoo.ZOO[name].role == "target" and "drafter-1.6m" in THERE:
            found = pair(words[name], words["drafter-1.6m"])
            assert found.unspelt == 0
            assert 0.1 < found.direct / words[name].size < 0.9, "direct maps, and n-grams too"


def test_a_model_is_built_from_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two steps of training; the card tells what came of it."""
    monkeypatch.setattr(zoo, "documents", lambda model, data: sentences(0, 250))
    steps: list[int] = []
    model = tiny_model("target", steps=2)
    report = zoo.build(model, tmp_path / "data", tmp_path, lambda step, loss: steps.append(step))
    assert steps == [1, 2]
    tokenizer = load_tokenizer(str(tmp_path / "target"))
    words = Vocabulary(tokenizer)
    text = "Ann has 3 Brötchen\n\tand 12 €."
    assert words.decode(words.encode(text)) == text
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"]) == (model.vocabulary_size, "bfloat16")
    assert config["eos_token_id"] == tokenizer.eos_token_id
    card = (tmp_path / "target" / "README.md").read_text(encoding="utf-8")
    assert f"**{report.validation_loss:.3f}** on held-out documents" in card


@pytest.mark.parametrize("name", ["drafter", "target"])
def test_a_tokenizer_gives_every_text_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also what it has never seen: bytes stand in for characters that it does not know."""
    monkeypatch.setattr(zoo, "documents", lambda model, data: sentences(0, 250))
    zoo.build(tiny_model(name, steps=1), tmp_path, tmp_path, lambda step, loss: None)
    words = Vocabulary(load_tokenizer(str(tmp_path / name)))
    for text in ("Tom has 7 apples", "\n\n  x = {'a': 1}\n", "naïve 🙂 日本語", "</s> is text", "1234567890"):
        assert words.decode(words.encode(text)).removeprefix(" ") == text.removeprefix(" ")


def test_a_recipe_without_its_data_says_what_is_missing(tmp_path: Path):
    with pytest.raises(ModelError, match="--data"):
        zoo.documents(zoo.ZOO["drafter-1.6m"], tmp_path)


def test_the_card_tells_recipe_texts_and_samples():
    model = zoo.ZOO["drafter-1.6m"]
    card = zoo.model_card(model, Report(2.5, 2.25, 1_234_567, 60.0), ["one", "two", "three", "four"])
    assert "2.250 nats per token at the end of training" in card
    assert "**2.500** on held-out documents (perplexity 12.2)" in card
    assert "1,234,567" in card
    assert "100% of wikitext2" in card
    assert "2% of functions" in card
    for prompt, sample in zip(zoo.SAMPLE_PROMPTS, ("one", "two", "three", "four"), strict=True):
        assert f"{prompt}⏎\n{sample}\n" in card


def test_the_commands_list_and_find_them(omnidraft: Command):  # noqa: F811
    listed = omnidraft("zoo", "list")
    assert listed.status == 0
    assert all(f"builtin:{name}" in listed.out for name in zoo.ZOO), "whole names, in 80 columns"
    for name in THERE:
        assert Path(omnidraft("zoo", "path", f"builtin:{name}").out.strip()) == zoo.MODELS_FOLDER / name
    unknown = omnidraft("zoo", "path", "target-9")
    assert (unknown.status, unknown.out) == (2, "")
    assert "target-12m" in unknown.err


def test_the_command_builds(omnidraft: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setattr(zoo, "documents", lambda model, data: sentences(0, 250))
    monkeypatch.setitem(zoo.ZOO, "tiny", tiny_model("tiny"))
    built = omnidraft("zoo", "build", "tiny", "--steps", "2", "--out", tmp_path)
    assert built.status == 0
    assert re.search(r"tiny: validation loss \d\.\d{3} nats per token", built.err)
    assert (tmp_path / "tiny" / "model.safetensors").is_file()
