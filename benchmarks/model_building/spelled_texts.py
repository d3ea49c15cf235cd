"""Texts in the pieces of a drafter, and rows of them to train on. Part of the source tree only.

Shapes: B rows of a batch, T pieces of a row, K labels of a piece, N tokens of an answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from torch import Tensor

from benchmarks.model_building.answers import KEPT
from stages.vocabulary.chat import Conversation
from stages.vocabulary.pair import Pair
from stages.vocabulary.tokenizer_view import Vocabulary

PROMPT_WEIGHT = 0.2  # of a prompt's pieces in the loss: they are context for the drafter, hardly ever its draft
MEASURED_SPLITS = ("test", "validation")
CALCULATOR_MARKS = r"<<[^>]*>>"  # of GSM8K
CONTEXT = 96  # pieces of a prompt that are trained on at most, its last ones: what is before matters little


@dataclass(frozen=True)
class Mixture:
    """Chances of the three kinds of texts in a row."""

    answers: float = 0.7  # the target's own
    references: float = 0.15  # those of the data sets, after the same prompts in the chat template
    documents: float = 0.15  # without a chat template


class LabelledText(NamedTuple):
    """Pieces of a text, and what a drafter should have predicted at each."""

    pieces: NDArray[np.int64]  # (T) of the text
    # (T, K) pieces that are right at a place; where only the text's own is known, it is the first
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]  # (T, K) of the labels in the loss, 0 for those that do not exist


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

    def spell_answer(self, row: dict[str, Any]) -> LabelledText:
        """Spell a prompt and the target's answer: the answer token by token, as verification extends a sequence.

        The first piece of a token has as labels the first pieces of the target's likeliest tokens at its place,
        weighted by the squares of their probabilities: halfway between the distribution, which acceptance at
        temperature 1 needs, and its maximum, which temperature 0 needs. Its other pieces have themselves.
        """
        context = self._pair.context
        answer = [piece for token in row["emitted"] for piece in context[token]]
        text = self._join(row["text"], answer)
        lengths_N = np.array([len(context[token]) for token in row["emitted"]])
        places_N = len(text.pieces) - len(answer) + np.cumsum(lengths_N) - lengths_N
        labels_NK = np.array([self._first_piece(token) for token in row["likeliest"]]).reshape(-1, KEPT)
        weights_NK = np.square(row["chances"]).reshape(-1, KEPT) * (labels_NK >= 0)
        known_N = (lengths_N > 0) & (weights_NK.sum(1) > 0)
        places_N, labels_NK, weights_NK = places_N[known_N], labels_NK[known_N], weights_NK[known_N]
        text.labels[places_N] = labels_NK.clip(0)
        text.weights[places_N] = weights_NK / weights_NK.sum(1, keepdims=True)
        return text

    def spell_reference(self, prompt: str, reference: str) -> LabelledText:
        """Spell a prompt and the answer of a data set."""
        end = [] if self._drafter.eos is None else [self._drafter.eos]
        return self._join(prompt, [*self._drafter.encode_text(reference, first=False), *end])

    def spell_document(self, text: str) -> LabelledText:
        """Spell a text without a prompt."""
        return _label_by_itself([], self._drafter.encode_text(text, first=True))

    def find_places(self, row: dict[str, Any]) -> PlacedText:
        """Spell a whole prompt and the target's answer, and find the places where a token of the answer begins."""
        pieces, places = list(self._chat.encode(row["text"])[1]), list[int]()
        for token in row["emitted"]:
            places.append(len(pieces))
            pieces.extend(self._pair.context[token])
        return PlacedText(pieces, places)

    def _join(self, prompt: str, answer: Sequence[int]) -> LabelledText:
        return _label_by_itself(self._chat.encode(prompt)[1][-CONTEXT:], answer)

    def _first_piece(self, token: int) -> int:
        """Return the piece that a token's spelling begins with; -1 for a token without one."""
        return self._pair.context[token][0] if self._pair.context[token] else -1


def _label_by_itself(before: Sequence[int], text: Sequence[int]) -> LabelledText:
    """Return a text whose only label at each place is its own piece, after context whose labels weigh little."""
    pieces = np.array([*before, *text], dtype=np.int64)
    weights = np.zeros((len(pieces), KEPT), np.float32)
    weights[: len(before), 0], weights[len(before) :, 0] = PROMPT_WEIGHT, 1.0
    return LabelledText(pieces, pieces[:, None].repeat(KEPT, axis=1), weights)


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

    def __init__(self, kinds: Sequence[tuple[Sequence[LabelledText], float]], length: int, seed: int) -> None:
        self._kinds, self._length, self._random = kinds, length, Random(seed)
        self._orders: list[list[int]] = [[] for _ in kinds]

    def draw(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return pieces (B, T), labels (B, T, K) and the labels' weights (B, T, K)."""
        drawn = [self._draw_row() for _ in range(rows)]
        pieces_BT, labels_BTK, weights_BTK = (torch.from_numpy(np.stack(part)) for part in zip(*drawn, strict=True))
        return pieces_BT, labels_BTK, weights_BTK

    def _draw_row(self) -> LabelledText:
        (kind,) = self._random.choices(range(len(self._kinds)), [chance for _, chance in self._kinds])
        texts, length = list[LabelledText](), 0
        while length < self._length:
            texts.append(self._next_text(kind))
            length += len(texts[-1].pieces)
        return LabelledText(*(np.concatenate(part)[: self._length] for part in zip(*texts, strict=True)))

    def _next_text(self, kind: int) -> LabelledText:
        """Return the next text of a kind: all of them once, in random order, before any comes again."""
        texts, order = self._kinds[kind][0], self._orders[kind]
        if not order:
            order.extend(self._random.sample(range(len(texts)), len(texts)))
        return texts[order.pop()]
