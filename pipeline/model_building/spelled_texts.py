"""Texts in the pieces of a drafter, and rows of them to train on. Part of the source tree only.

Shapes: B rows of a batch, T pieces of a row.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from pyarrow import parquet
from torch import Tensor

from stages.vocabulary.chat import Conversation
from stages.vocabulary.pair import Pair
from stages.vocabulary.tokenizer_view import Vocabulary

PROMPT_WEIGHT = 0.2  # of a prompt's pieces in the loss: they are context for the drafter, hardly ever its draft
MEASURED_SPLITS = ("test", "validation")
CALCULATOR_MARKS = r"<<[^>]*>>"  # of GSM8K
CONTEXT = 96  # pieces of a prompt that are trained on at most, its last ones: what is before matters little


@dataclass(frozen=True)
class Mixture:
    """Chances of the three kinds of texts in a row.

    Attributes:
        answers: the target's own.
        references: those of the data sets, after the same prompts in the chat template.
        documents: without a chat template.
    """

    answers: float = 0.6
    references: float = 0.2
    documents: float = 0.2


class WeightedText(NamedTuple):
    """Pieces of a text, and the weight of each in the loss."""

    pieces: list[int]
    weights: list[float]


class PlacedText(NamedTuple):
    """Pieces of a text, and the places of the first pieces of its answer's tokens."""

    pieces: list[int]
    places: list[int]


class TextSpeller:
    """Spells texts in pieces as the drafter reads them in service.

    Args:
        drafter: its vocabulary.
        pair: of the target's vocabulary and the drafter's.
        chat: encodes prompts for both.
    """

    def __init__(self, drafter: Vocabulary, pair: Pair, chat: Conversation) -> None:
        self._drafter, self._pair, self._chat = drafter, pair, chat

    def spell_answer(self, row: dict[str, Any]) -> WeightedText:
        """Spell a prompt and the target's answer: the answer token by token, as verification extends a sequence."""
        answer = [piece for token in row["emitted"] for piece in self._pair.context[token]]
        return self._join(row["text"], answer)

    def spell_reference(self, prompt: str, reference: str) -> WeightedText:
        """Spell a prompt and the answer of a data set."""
        end = [] if self._drafter.eos is None else [self._drafter.eos]
        return self._join(prompt, [*self._drafter.encode_text(reference, first=False), *end])

    def spell_document(self, text: str) -> WeightedText:
        """Spell a text without a prompt."""
        pieces = list(self._drafter.encode_text(text, first=True))
        return WeightedText(pieces, [1.0] * len(pieces))

    def find_places(self, row: dict[str, Any]) -> PlacedText:
        """Spell a whole prompt and the target's answer, and find the places where a token of the answer begins."""
        pieces, places = list(self._chat.encode(row["text"])[1]), list[int]()
        for token in row["emitted"]:
            places.append(len(pieces))
            pieces.extend(self._pair.context[token])
        return PlacedText(pieces, places)

    def _join(self, prompt: str, answer: list[int]) -> WeightedText:
        before = list(self._chat.encode(prompt)[1])[-CONTEXT:]
        return WeightedText([*before, *answer], [PROMPT_WEIGHT] * len(before) + [1.0] * len(answer))


def read_references(data: Path, datasets: Sequence[str], seed: int) -> list[tuple[str, str]]:
    """Return prompts and answers of the training splits of data sets."""
    found: list[tuple[str, str]] = []
    for name in datasets:
        rows = parquet.read_table(data / f"{name}.parquet", columns=["split", "prompt", "reference"]).to_pylist()
        used = (row for row in rows if row["reference"] and row["split"] not in MEASURED_SPLITS)
        found += [(row["prompt"], re.sub(CALCULATOR_MARKS, "", row["reference"])) for row in used]
    Random(seed).shuffle(found)
    return found


class RowSampler:
    """Draws rows of pieces: texts of the three kinds, joined and cut to one length.

    Args:
        kinds: per kind its texts and its chance.
        length: pieces of a row.
        seed: of all draws.
    """

    def __init__(self, kinds: Sequence[tuple[Sequence[WeightedText], float]], length: int, seed: int) -> None:
        self._kinds, self._length, self._random = kinds, length, Random(seed)
        self._orders: list[list[int]] = [[] for _ in kinds]

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return pieces and their weights (B, T)."""
        drawn = [self._draw_row() for _ in range(rows)]
        return torch.tensor([row.pieces for row in drawn]), torch.tensor([row.weights for row in drawn])

    def _draw_row(self) -> WeightedText:
        (kind,) = self._random.choices(range(len(self._kinds)), [chance for _, chance in self._kinds])
        row = WeightedText([], [])
        while len(row.pieces) < self._length:
            text = self._next_text(kind)
            row.pieces.extend(text.pieces)
            row.weights.extend(text.weights)
        return WeightedText(row.pieces[: self._length], row.weights[: self._length])

    def _next_text(self, kind: int) -> WeightedText:
        """Return the next text of a kind: all of them once, in random order, before any comes again."""
        texts, order = self._kinds[kind][0], self._orders[kind]
        if not order:
            order.extend(self._random.sample(range(len(texts)), len(texts)))
        return texts[order.pop()]
