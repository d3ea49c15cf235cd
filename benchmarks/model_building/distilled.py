"""A drafter that is distilled from a target's answers, with other texts so that it fits other targets too.

Part of the source tree only. The loss is the cross-entropy of the first pieces of what the target found likeliest at
each place of its answers (`spelled_texts` weights them), and of the texts' own pieces elsewhere.

Shapes: B rows of a batch, T pieces of a row, V pieces, K labels of a piece, N = B * (T - 1).
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.model_building import recipes
from benchmarks.model_building.answers import QUESTIONS, read_answers, read_questions, write_answers
from benchmarks.model_building.pretrain import Report, optimise
from benchmarks.model_building.recipes import ModelRecipe
from benchmarks.model_building.spelled_texts import Mixture, PlacedText, RowSampler, TextSpeller, read_references
from pipeline.assembly.models import load_only_target, load_vocabulary
from pipeline.config.settings import Config
from stages.vocabulary.chat import ChatEncoder, Conversation, PlainConversation
from stages.vocabulary.pair import Pair, pair
from stages.vocabulary.tokenizer_view import Vocabulary

MIXTURE = Mixture()
HOLD_OUT = 40  # one question in so many is measured with
MEASURED = 60  # answers that the accuracy is measured on at most


@dataclass(frozen=True)
class DistilledRecipe:
    """How a distilled drafter is made."""

    base: ModelRecipe  # its shape, the split of its tokenizer, its documents, and its training
    target: str = "smollm2-135m"  # what answers the questions
    max_new_tokens: int = 96  # of an answer
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.8)  # of the answers, in turn
    # data sets whose answers are read after their prompts
    references: tuple[str, ...] = ("dolly_partial", "gsm8k", "mbpp", "self_instruct")
    mixture: Mixture = MIXTURE  # of the three kinds of texts


RECIPES = {"drafter-4m": DistilledRecipe(recipes.RECIPES["drafter-4m"])}


def labelled_loss(model: torch.nn.Module, pieces_BT: Tensor, labels_BTK: Tensor, weights_BTK: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy of the labels of each piece given the pieces before it (a scalar, nats).

    Computed in bfloat16, sums in float32.
    """
    with torch.autocast(pieces_BT.device.type, torch.bfloat16):
        logits_BTV = model(input_ids=pieces_BT[:, :-1]).logits
    logits_NV = logits_BTV.flatten(0, 1).float()
    labels_NK, weights_NK = labels_BTK[:, 1:].flatten(0, 1), weights_BTK[:, 1:].flatten(0, 1)
    losses_NK = logits_NV.logsumexp(-1, keepdim=True) - logits_NV.gather(1, labels_NK)
    loss: Tensor = (losses_NK * weights_NK).sum() / weights_NK.sum()
    return loss


@torch.no_grad()
def measure(model: Any, texts: Sequence[PlacedText]) -> tuple[float, float]:
    """Return the mean loss over the places of texts, in nats, and the share of them where the likeliest piece is right.

    `texts` have the places of the first pieces of the answers' tokens.
    """
    right, losses = list[bool](), list[float]()
    for text in texts:
        log_TV = model(input_ids=torch.tensor([text.pieces[:-1]])).logits[0].log_softmax(-1)
        for place in text.places:
            right.append(int(log_TV[place - 1].argmax()) == text.pieces[place])
            losses.append(-float(log_TV[place - 1, text.pieces[place]]))
    return sum(losses) / len(losses), sum(right) / len(right)


def build(recipe: DistilledRecipe, data: Path, out: Path, progress: Callable[[int, float], None]) -> Report:
    """Let the target answer, train the drafter, and write its folder with a model card.

    The answers stay in a folder next to it, so that a build that was stopped continues with them.

    Args:
        data: folder of the prepared data sets.
        out: parent of the new model's folder.
        progress: called with the number of steps done and the last one's loss.
    """
    base, seed = recipe.base, recipe.base.training.seed
    answered = out / f"{base.model.name}-answers"
    _let_target_answer(recipe, data, answered)
    rows = read_answers(answered)
    documents = recipes.documents(base, data)
    references = read_references(data, recipe.references, seed)
    target = load_vocabulary(recipe.target, Config().publish, out)
    texts = [target.tokenizer.decode(row["emitted"], skip_special_tokens=True) for row in rows] * 3
    texts += ["\n".join(reference) for reference in references[:6000]] + documents[:6000]
    tokenizer = recipes.make_tokenizer(base, texts)
    drafter = Vocabulary(tokenizer, base.model.name)
    paired = pair(target, drafter, Config().vocabulary.special)
    speller = TextSpeller(drafter, paired, _make_conversation(target, drafter, paired))
    sampler = RowSampler(
        [
            ([speller.spell_answer(row) for row in rows if not _is_held_out(row)], recipe.mixture.answers),
            ([speller.spell_reference(*reference) for reference in references], recipe.mixture.references),
            ([speller.spell_document(text) for text in documents], recipe.mixture.documents),
        ],
        base.training.length,
        seed,
    )
    model, began = recipes.make_llama(base, tokenizer), time.perf_counter()
    losses = optimise(model, lambda: labelled_loss(model, *sampler.draw(base.training.rows)), base.training, progress)
    seconds = time.perf_counter() - began
    held = [speller.find_places(row) for row in rows if _is_held_out(row)][:MEASURED]
    held_out_loss, accuracy = measure(model, held)
    report = Report(
        validation_loss=held_out_loss,
        train_loss=sum(losses[-len(losses) // 20 :]) / len(losses[-len(losses) // 20 :]),
        tokens_seen=base.training.steps * base.training.rows * base.training.length,
        seconds=seconds,
    )
    folder = out / base.model.name
    recipes.save(folder, model, tokenizer)
    card = make_card(recipe, report, rows, accuracy)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return report


def _let_target_answer(recipe: DistilledRecipe, data: Path, folder: Path) -> None:
    config = Config().with_overrides({"targets": (recipe.target,), "drafter": "builtin:drafter-1.6m"})
    models = load_only_target(config, folder)
    chat = _make_conversation(models.target_vocabulary, models.drafter_vocabulary, models.pair)
    torch.manual_seed(recipe.base.training.seed)
    questions = read_questions(data, chat, recipe.temperatures, recipe.base.training.seed)
    write_answers(models.target, models.eos_ids, questions, recipe.max_new_tokens, folder, lambda done, tokens: None)


def _make_conversation(target: Vocabulary, drafter: Vocabulary, pair: Pair) -> Conversation:
    """Return the encoder of prompts: with the target's chat template, if it has one."""
    templated = target.tokenizer.chat_template
    return ChatEncoder(target, drafter, pair) if templated else PlainConversation(target, drafter)


def _is_held_out(row: dict[str, Any]) -> bool:
    return bool(row["number"] % HOLD_OUT == 7)


def make_card(recipe: DistilledRecipe, report: Report, rows: Sequence[dict[str, Any]], accuracy: float) -> str:
    """Return the README of a distilled drafter: what it is, how it was made, how good it is."""
    base, tokens = recipe.base, sum(len(row["emitted"]) for row in rows)
    mixture = ", ".join(f"{share:.0%} {kind}" for kind, share in asdict(recipe.mixture).items())
    names = {question.dataset for question in QUESTIONS} | {*recipe.references, *base.texts}
    lines = [
        f"# {base.model.name}",
        "",
        f"A small Llama in bfloat16, distilled from {recipe.target}, with a vocabulary of "
        f"{base.model.vocabulary_size:,} and the shape `{json.dumps(base.model.shape)}`.",
        "",
        f"- Made by `python -m benchmarks.model_building {base.model.name}` with "
        f"`{json.dumps(asdict(base.training))}`.",
        f"- Texts: {len(rows):,} answers of {recipe.target} ({tokens:,} tokens, temperatures "
        f"{', '.join(map(str, recipe.temperatures))} in turn), answers of data sets, documents; rows: {mixture}.",
        f"- Licences of the text: {'; '.join(sorted({recipes.LICENCES[name] for name in names}))}.",
        recipes.OWN_LICENCE,
        f"- Pieces seen: {report.tokens_seen:,}, in {report.seconds:,.0f} s.",
        f"- Loss: {report.train_loss:.3f} nats per piece at the end of training, **{report.validation_loss:.3f}** on "
        f"held-out documents, which are answers; {accuracy:.1%} of the first pieces of their tokens are right.",
        "",
        "It drafts for a target and answers nothing by itself.",
        "",
    ]
    return recipes.wrap_card("\n".join(lines))
