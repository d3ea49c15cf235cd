"""The training of the built-in models: their recipes, and how one is made."""

import json
import re
from pathlib import Path

import pytest
from tiny_pair import sentences, tiny_model

from benchmarks.model_building import distilled, recipes
from benchmarks.model_building.__main__ import build
from benchmarks.model_building.pretrain import Report
from benchmarks.model_building.recipes import RECIPES
from pipeline.models import catalog as zoo
from stages.engine.models.huggingface import load_tokenizer
from stages.vocabulary.tokenizer_view import Vocabulary
from store.errors import ModelError

THERE = [name for name in zoo.ZOO if (zoo.MODELS_FOLDER / name / "model.safetensors").is_file()]


def test_every_model_has_a_recipe():
    assert {name: recipe.model for name, recipe in RECIPES.items()} == zoo.ZOO
    assert len({recipe.split for recipe in RECIPES.values()}) == 4


def test_an_unknown_name_is_refused():
    with pytest.raises(ModelError, match=r"drafter-1\.6m, drafter-4m, target-7m, target-12m"):
        recipes.select_recipes(["target-7"], None)


def test_the_drafter_has_something_to_learn():
    """It knows little of the streams' texts, its targets all of their kind."""
    drafter, targets = RECIPES["drafter-1.6m"], [recipe for recipe in RECIPES.values() if recipe.model.role == "target"]
    assert not {"gsm8k", "mbpp"} & drafter.texts.keys()
    assert drafter.texts["functions"] < 0.1
    for target in targets:
        assert {"gsm8k", "mbpp", "functions", "documentation"} <= {n for n, share in target.texts.items() if share == 1}


def test_names_are_chosen_with_or_without_builtin_and_with_other_steps():
    (recipe,) = recipes.select_recipes(["builtin:target-7m"], 3)
    assert (recipe.model.name, recipe.training.steps) == ("target-7m", 3)
    (recipe,) = recipes.select_recipes(["target-7m"], None)
    assert recipe == RECIPES["target-7m"]


@pytest.mark.parametrize("name", THERE)
def test_a_model_card_states_the_validation_loss(name: str):
    card = (zoo.path_of(name) / "README.md").read_text(encoding="utf-8")
    found = re.search(r"\*\*(\d\.\d{3})\*\* on held-out documents", card)
    assert found, "the validation loss"
    assert 0.5 < float(found[1]) < 6.0
    assert f"python -m benchmarks.model_building {name}" in card
    assert card.count("```text") == (0 if name in distilled.RECIPES else len(recipes.SAMPLE_PROMPTS))


def test_a_model_is_built_from_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two steps of training; the card reports the result."""
    monkeypatch.setattr(recipes, "documents", lambda recipe, data: sentences(0, 250))
    steps: list[int] = []
    recipe = tiny_model("target", steps=2)
    report = recipes.build(recipe, tmp_path / "data", tmp_path, lambda step, loss: steps.append(step))
    assert steps == [1, 2]
    tokenizer = load_tokenizer(str(tmp_path / "target"))
    words = Vocabulary(tokenizer)
    text = "Ann has 3 Brötchen\n\tand 12 €."
    assert words.decode(words.encode(text)) == text
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"]) == (recipe.model.vocabulary_size, "bfloat16")
    assert config["eos_token_id"] == tokenizer.eos_token_id
    card = (tmp_path / "target" / "README.md").read_text(encoding="utf-8")
    assert f"**{report.validation_loss:.3f}** on held-out documents" in card


@pytest.mark.parametrize("name", ["drafter", "target"])
def test_a_tokenizer_gives_every_text_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Unseen characters too: the tokenizer encodes them as bytes."""
    monkeypatch.setattr(recipes, "documents", lambda recipe, data: sentences(0, 250))
    recipes.build(tiny_model(name, steps=1), tmp_path, tmp_path, lambda step, loss: None)
    words = Vocabulary(load_tokenizer(str(tmp_path / name)))
    for text in ("Tom has 7 apples", "\n\n  x = {'a': 1}\n", "naïve 🙂 日本語", "</s> is text", "1234567890"):
        assert words.decode(words.encode(text)).removeprefix(" ") == text.removeprefix(" ")


def test_a_recipe_without_its_data_names_what_is_missing(tmp_path: Path):
    with pytest.raises(ModelError, match="--data"):
        recipes.documents(RECIPES["drafter-1.6m"], tmp_path)


def test_the_card_lists_recipe_texts_and_samples():
    recipe = RECIPES["drafter-1.6m"]
    card = recipes.model_card(recipe, Report(2.5, 2.25, 1_234_567, 60.0), ["one", "two", "three", "four"])
    words = " ".join(card.split())  # lines are wrapped
    assert "2.250 nats per token at the end of training" in words
    assert "**2.500** on held-out documents (perplexity 12.2)" in words
    assert "1,234,567" in words
    assert "100% of wikitext2" in words
    assert "2% of functions" in words
    for prompt, sample in zip(recipes.SAMPLE_PROMPTS, ("one", "two", "three", "four"), strict=True):
        assert f"{prompt}⏎\n{sample}\n" in card


def test_the_command_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(recipes, "documents", lambda recipe, data: sentences(0, 250))
    recipe = tiny_model("tiny")
    monkeypatch.setitem(zoo.ZOO, "tiny", recipe.model)
    monkeypatch.setitem(RECIPES, "tiny", recipe)
    with caplog.at_level("INFO"):
        build(["tiny"], out=tmp_path, steps=2)
    assert re.search(r"tiny: validation loss \d\.\d{3} nats per token", caplog.text)
    assert (tmp_path / "tiny" / "model.safetensors").is_file()


def test_long_lines_of_a_card_are_wrapped_and_the_others_stay():
    text = f"- point: {'word ' * 30}\n    code, as it was\n{'word ' * 30}"
    lines = recipes.wrap_card(text).split("\n")
    assert [len(line) <= recipes.CARD_WIDTH for line in lines] == [True] * 5
    assert [line.split("word")[0] for line in lines] == ["- point: ", "  ", "    code, as it was", "", ""]
    assert " ".join(text.split()) == " ".join(" ".join(lines).split())
