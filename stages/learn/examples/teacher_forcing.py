"""Makes training examples of texts that exist already: the target reads them, and the teacher selects what is kept.

The examples are those that decoding would have made of the same texts, without acceptance labels, which need drafts.

Shapes: V target tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from stages.contract.blocks import Decision, Draft, Proposal, SequenceState, TrainingExample
from stages.engine.models.language_model import LanguageModel
from stages.learn.examples.builder import ExampleBuilder
from stages.learn.examples.teacher import TrieTeacher
from stages.sampling.random_source import SeededRandomSource
from store.events import Origin, Outcome

MAX_LOGITS = 1 << 25  # logits of one pass of the target: 128 MiB in float32
BATCH = 8  # texts that are read together


@dataclass(frozen=True)
class CompletedText:
    """A prompt and its completion."""

    offset: int  # number of the text
    prompt: tuple[int, ...]  # the prompt in target tokens, at least one
    prompt_pieces: tuple[int, ...]  # the prompt as the drafter tokenizes it
    emitted: tuple[int, ...]  # the completion in target tokens, at least one


class TeacherForcing:
    """Computes the target's distributions along texts.

    Args:
        context: per target id the pieces that the drafter reads for it.
    """

    def __init__(
        self, target: LanguageModel, name: str, teacher: TrieTeacher, context: Sequence[tuple[int, ...]]
    ) -> None:
        self._target, self._name, self._teacher, self._context = target, name, teacher, context

    def make_examples(self, texts: Sequence[CompletedText]) -> Iterator[TrainingExample]:
        """Yield one example per text, shorter texts first. Texts must fit into the context of the target."""
        ordered = sorted(texts, key=lambda text: len(text.prompt) + len(text.emitted))
        for start in range(0, len(ordered), BATCH):
            yield from self._read_batch(ordered[start : start + BATCH])

    def _read_batch(self, texts: Sequence[CompletedText]) -> list[TrainingExample]:
        rows = [_make_row(text) for text in texts]
        builders = [ExampleBuilder() for _ in rows]
        for row in rows:
            self._target.admit(row, row.tokens)
        at_once = max(1, MAX_LOGITS // (self._target.vocabulary_size * len(rows)))
        longest = max(len(text.emitted) for text in texts)
        for start in range(0, longest, at_once):
            self._read_tokens(rows, [text.emitted[start : start + at_once] for text in texts], builders)
        for row in rows:
            self._target.release(row)
        return [builder.build(row, self._name) for builder, row in zip(builders, rows, strict=True)]

    def _read_tokens(
        self, rows: Sequence[SequenceState], emitted: Sequence[tuple[int, ...]], builders: Sequence[ExampleBuilder]
    ) -> None:
        """Read the next tokens of each row, none of a row that has ended, and append them to the rows."""
        fed = [[row.tokens[-1], *tokens[:-1]] if tokens else [] for row, tokens in zip(rows, emitted, strict=True)]
        logits_NV, _ = self._target.forward(rows, fed, [len(tokens) for tokens in emitted])
        active, start = [], 0
        for number, tokens in enumerate(emitted):
            if tokens:
                active.append((number, start))
            start += len(tokens)
        soft_targets = self._teacher(
            [Proposal(Draft(rows[number], (), torch.zeros(0, 0), (), None, ()), ()) for number, _ in active],
            [
                tuple(
                    Decision(index, None, Outcome.UNDRAFTED, token, Origin.BONUS)
                    for index, token in enumerate(emitted[number])
                )
                for number, _ in active
            ],
            logits_NV,
            [start for _, start in active],
        )
        for (number, _), of_text in zip(active, soft_targets, strict=True):
            row, builder = rows[number], builders[number]
            builder.soft_targets.append(of_text)
            for token in emitted[number]:
                pieces = self._context[token]
                if len(pieces) > 1:
                    builder.ngram_positions += range(len(row.pieces), len(row.pieces) + len(pieces))
                row.tokens.append(token)
                row.pieces.extend(pieces)


def _make_row(text: CompletedText) -> SequenceState:
    return SequenceState(
        text.offset,
        "",
        "",
        "",
        list(text.prompt),
        len(text.prompt),
        list(text.prompt_pieces),
        SeededRandomSource(0, text.offset),
        len(text.emitted),
    )
