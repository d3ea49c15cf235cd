"""A drafter that is distilled from a target's answers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tiny_pair import TinyPair, sentences, tiny_model

from benchmarks.model_building import answers, distilled, recipes
from benchmarks.model_building.answers import KEPT, QUESTIONS, read_answers, read_questions, write_answers
from benchmarks.model_building.distilled import DistilledRecipe
from benchmarks.model_building.spelled_texts import PROMPT_WEIGHT, TextSpeller
from pipeline.assembly.models import load_only_target
from pipeline.config.settings import Config
from stages.vocabulary.chat import PlainConversation
from stages.vocabulary.pair import Pair


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data sets of the recipe, with a few rows each."""
    monkeypatch.setattr(answers, "FUNCTIONS", 2)
    folder = tmp_path / "data"
    folder.mkdir()
    names = {one.dataset: one.splits[0] for one in QUESTIONS}
    for number, (name, split) in enumerate(names.items()):
        texts = sentences(10 * number, 10 * number + 8)
        rows = [{"split": split, "prompt": text[:30], "reference": text[30:]} for text in texts]
        rows.append({"split": "test", "prompt": "never generated from", "reference": "never read"})
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


@pytest.fixture
def models(tiny_pair: TinyPair, tmp_path: Path):
    names = {"targets": (str(tiny_pair.target),), "drafter": str(tiny_pair.drafter)}
    return load_only_target(Config().with_overrides(names), tmp_path)


@pytest.fixture
def chat(models) -> PlainConversation:
    return PlainConversation(models.target_vocabulary, models.drafter_vocabulary)


def test_questions_are_of_training_splits_and_of_both_temperatures(data: Path, chat: PlainConversation):
    found = read_questions(data, chat, (0.0, 0.8), seed=0)
    assert len([question for question in found if question.dataset != "functions"]) == 8 * len(QUESTIONS)
    assert not any(question.text == "never generated from" for question in found)
    assert {question.temperature for question in found} == {0.0, 0.8}
    assert found == read_questions(data, chat, (0.0, 0.8), seed=0)
    assert found != read_questions(data, chat, (0.0, 0.8), seed=1)


def test_greedy_answers_are_those_of_plain_decoding(
    data: Path, models, chat: PlainConversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Holds in waves whose rows end at different times, and where half of a wave is sampled."""
    monkeypatch.setattr(answers, "WAVE", 5)
    questions = read_questions(data, chat, (0.0, 0.8), seed=0)[:12]
    write_answers(models.target, models.eos_ids, questions, 7, tmp_path / "answers", lambda done, tokens: None)
    rows = {row["number"]: row for row in read_answers(tmp_path / "answers")}
    assert rows.keys() == {question.number for question in questions}
    for question in questions:
        emitted = rows[question.number]["emitted"]
        assert len(emitted) == 7 or emitted[-1] in models.eos_ids
        chances = rows[question.number]["chances"]
        assert all(1 >= one >= other > 0 for one, other in pairwise(chances[:KEPT]))
        assert len(chances) == len(rows[question.number]["likeliest"]) == KEPT * len(emitted)
        if question.temperature == 0:
            assert rows[question.number]["likeliest"][::KEPT] == emitted
            ids = torch.tensor([[*question.tokens, *emitted]])
            best = models.target.model(ids).logits[0].argmax(-1).tolist()
            assert emitted == best[len(question.tokens) - 1 : -1]


def make_row(emitted: Sequence[int], pair: Pair) -> dict[str, Any]:
    """Return an answer of which the target found the emitted tokens likelier than the first tokens with pieces."""
    others = [token for token, pieces in enumerate(pair.context) if pieces][: KEPT - 1]
    likeliest = [one for token in emitted for one in (token, *others)]
    return {
        "text": "Ann has",
        "emitted": list(emitted),
        "likeliest": likeliest,
        "chances": [0.6, 0.3, 0.0, 0.0] * len(emitted),
    }


def test_an_answer_is_spelled_as_verification_spells_it(models, chat: PlainConversation):
    speller = TextSpeller(models.drafter_vocabulary, models.pair, chat)
    emitted = models.target_vocabulary.encode_text(sentences(3, 4)[0], first=False)
    row = make_row(emitted, models.pair)
    text, placed = speller.spell_answer(row), speller.find_places(row)
    assert text.pieces.tolist() == placed.pieces
    answer = [piece for token in emitted for piece in models.pair.context[token]]
    assert placed.pieces[-len(answer) :] == answer
    assert [placed.pieces[place] for place in placed.places] == [models.pair.context[token][0] for token in emitted]
    sums_T = text.weights.sum(1)
    assert sums_T[-len(answer) :] == pytest.approx(1.0)
    assert sums_T[: -len(answer)] == pytest.approx(PROMPT_WEIGHT)


def test_first_pieces_of_likely_tokens_are_labels(models, chat: PlainConversation):
    """The second token of the answer has two likely tokens, of 0.6 and 0.3: weights 0.8 and 0.2."""
    pair = models.pair
    emitted = models.target_vocabulary.encode_text(sentences(3, 4)[0], first=False)
    row = make_row(emitted, pair)
    text = TextSpeller(models.drafter_vocabulary, pair, chat).spell_answer(row)
    answer = sum(len(pair.context[token]) for token in emitted)
    second = len(text.pieces) - answer + len(pair.context[emitted[0]])
    other = row["likeliest"][KEPT + 1]
    assert text.labels[second, :2].tolist() == [pair.context[emitted[1]][0], pair.context[other][0]]
    assert text.weights[second] == pytest.approx([0.8, 0.2, 0.0, 0.0])


def test_the_loss_is_that_of_the_weighted_labels():
    torch.manual_seed(0)
    model = recipes.make_llama(tiny_model("drafter"), _Ids())
    pieces_BT = torch.tensor([[5, 6, 7, 8, 9]])
    labels_BTK, weights_BTK = pieces_BT[..., None].repeat(1, 1, 2), torch.zeros(1, 5, 2)
    labels_BTK[0, 1, 1] = 3
    weights_BTK[0, 1:3] = torch.tensor([[0.75, 0.25], [1.0, 0.0]])
    loss = distilled.labelled_loss(model, pieces_BT, labels_BTK, weights_BTK)
    with torch.no_grad():
        log_TV = model(pieces_BT).logits[0].log_softmax(-1)
    wanted = 0.75 * log_TV[0, 6] + 0.25 * log_TV[0, 3] + log_TV[1, 7]
    assert loss.item() == pytest.approx(-float(wanted) / 2, rel=0.02)  # in bfloat16


class _Ids:
    bos_token_id, eos_token_id, pad_token_id = 1, 2, 3


def test_a_drafter_is_built(data: Path, tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recipes, "documents", lambda recipe, data: sentences(0, 50))
    monkeypatch.setattr(distilled, "HOLD_OUT", 10)
    base = tiny_model("student", steps=2)
    base = replace(base, training=replace(base.training, rows=2, length=32))
    recipe = DistilledRecipe(base, target=str(tiny_pair.target), max_new_tokens=5)
    report = distilled.build(recipe, data, tmp_path, lambda step, loss: None)
    card = (tmp_path / "student" / "README.md").read_text(encoding="utf-8")
    assert f"**{report.validation_loss:.3f}** on held-out documents" in card
    assert f"{len(read_answers(tmp_path / 'student-answers')):,} answers" in card
    assert (tmp_path / "student" / "model.safetensors").is_file()
