"""The texts that a drafter is distilled from: a target's own answers to the questions of data sets.

Part of the source tree only. Answers are written in parts, so that a run that was stopped continues.

Shapes: B rows, V target tokens, K likeliest tokens that are kept of each place (`KEPT`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from pipeline.sources import corpus
from stages.contract.blocks import SequenceState
from stages.engine.models.language_model import LanguageModel
from stages.sampling.random_source import SeededRandomSource
from stages.vocabulary.chat import Conversation
from store.errors import ModelError

WAVE = 96  # questions that are answered together, of about equal length
PART = 10 * WAVE  # questions in a file
LONGEST_QUESTION = 400  # target tokens
KEPT = 4  # the likeliest tokens at each place of an answer: what a drafter learns from, besides the token itself


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one data set."""

    dataset: str  # name of its file
    splits: tuple[str, ...]  # whose rows are taken
    most: int  # number of questions to take at most, drawn at random


# Data sets whose licences allow to use what is made of them for anything. Not among them, and so left to measure with:
# the test splits of GSM8K and MBPP, HumanEval, and all of AlpacaEval and DialogSum.
QUESTIONS = (
    QuestionSet("gsm8k", ("train",), 3000),
    QuestionSet("mbpp", ("train", "validation", "prompt"), 474),
    QuestionSet("dolly_partial", ("train",), 6400),
    QuestionSet("self_instruct", ("seed", "user_oriented"), 427),
    QuestionSet("mawps", ("train",), 600),
    QuestionSet("glaive_toolcall_demo", ("demo",), 300),
    QuestionSet("scitldr", ("train",), 300),
)
FUNCTIONS = 1500  # of Python's standard library to complete, without those of the built-in stream of code


@dataclass(frozen=True)
class Question:
    """A prompt in the target's tokens, and how it is to be answered."""

    number: int  # its place among all questions; seeds its random draws
    dataset: str  # where it is from
    text: str  # without the chat template
    tokens: tuple[int, ...]  # with it
    temperature: float  # of the answer


def read_questions(data: Path, chat: Conversation, temperatures: Sequence[float], seed: int) -> list[Question]:
    """Return the questions of all sets in an order drawn with the seed, each with one of the temperatures."""
    streamed = {passage.prompt for passage in corpus.functions(held_out=True)}  # some functions are in several modules
    functions = [one.prompt for one in corpus.functions(held_out=False) if one.prompt not in streamed]
    Random(f"functions{seed}").shuffle(functions)
    texts = [("functions", prompt) for prompt in functions[:FUNCTIONS]]
    for one in QUESTIONS:
        path = data / f"{one.dataset}.parquet"
        if not path.is_file():
            raise ModelError(f"the recipe needs {path}; name the folder of the prepared data sets with --data")
        rows = parquet.read_table(path, columns=["split", "prompt"]).to_pylist()
        prompts = [row["prompt"] for row in rows if row["split"] in one.splits and row["prompt"].strip()]
        Random(f"{one.dataset}{seed}").shuffle(prompts)
        texts += [(one.dataset, prompt) for prompt in prompts[: one.most]]
    Random(seed).shuffle(texts)
    found = [
        Question(number, dataset, text, tuple(chat.encode(text)[0]), temperatures[number % len(temperatures)])
        for number, (dataset, text) in enumerate(texts)
    ]
    return [question for question in found if len(question.tokens) <= LONGEST_QUESTION]


def write_answers(
    target: LanguageModel,
    eos_ids: frozenset[int],
    questions: Sequence[Question],
    max_new_tokens: int,
    folder: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Answer all questions and write them to Parquet files, of which those that exist are kept.

    Args:
        target: without rows.
        eos_ids: tokens that end an answer.
        questions: in their order.
        max_new_tokens: of an answer.
        folder: where the files go.
        progress: called with the questions answered so far and their tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = 0
    for start in range(0, len(questions), PART):
        part, path = questions[start : start + PART], folder / f"{start:06d}.parquet"
        if not path.is_file():
            ordered = sorted(part, key=lambda question: len(question.tokens))
            rows: list[dict[str, Any]] = []
            for begin in range(0, len(ordered), WAVE):
                rows += answer_wave(target, eos_ids, ordered[begin : begin + WAVE], max_new_tokens)
                progress(start + len(rows), tokens + sum(len(row["emitted"]) for row in rows))
            partial = path.with_suffix(".partial")
            parquet.write_table(pa.Table.from_pylist(rows), partial)
            partial.replace(path)
        answers: list[list[int]] = parquet.read_table(path, columns=["emitted"])["emitted"].to_pylist()
        tokens += sum(map(len, answers))


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that `write_answers` wrote so far."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.parquet")):
        rows += parquet.read_table(path).to_pylist()
    return rows


def answer_wave(
    target: LanguageModel, eos_ids: frozenset[int], questions: Sequence[Question], max_new_tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield the answers of some questions, which are read and decoded together, in the order in which they end.

    An answer has its tokens (`emitted`) and, one after the other for all of them, the target's K likeliest at that
    place (`likeliest`) with their probabilities (`chances`).
    """
    rows = [_make_row(question, max_new_tokens) for question in questions]
    of_row = dict(zip(rows, questions, strict=True))
    likeliest: dict[SequenceState, list[int]] = {row: [] for row in rows}
    chances: dict[SequenceState, list[float]] = {row: [] for row in rows}
    for row in rows:
        target.admit(row, row.tokens, read=False)
    while rows:
        fed = [row.tokens[target.length(row) :] for row in rows]
        logits_BV, _ = target.forward(rows, fed, [1] * len(rows))
        for row, best, of_best in zip(rows, *_find_likeliest(logits_BV), strict=True):
            likeliest[row] += best
            chances[row] += of_best
        for row, token in zip(list(rows), _choose(rows, logits_BV, of_row), strict=True):
            row.tokens.append(token)
            row.remaining_tokens -= 1
            if token in eos_ids or not row.remaining_tokens:
                last = rows.pop()  # as the target's cache does
                if last is not row:
                    rows[rows.index(row)] = last
                target.release(row)
                question = of_row[row]
                yield {
                    "number": question.number,
                    "dataset": question.dataset,
                    "text": question.text,
                    "temperature": question.temperature,
                    "prompt": list(question.tokens),
                    "emitted": row.tokens[row.prompt_length :],
                    "likeliest": likeliest[row],
                    "chances": chances[row],
                }


@torch.inference_mode()
def _find_likeliest(logits_BV: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Return each row's K likeliest tokens, the likeliest first, and their probabilities at temperature 1."""
    best = logits_BV.topk(KEPT)
    chances_BK = (best.values - logits_BV.logsumexp(-1, keepdim=True)).exp()
    return best.indices.tolist(), chances_BK.tolist()


@torch.inference_mode()
def _choose(rows: Sequence[SequenceState], logits_BV: Tensor, of_row: dict[SequenceState, Question]) -> list[int]:
    """Return each row's next token: the likeliest at temperature 0, else one drawn by the Gumbel trick."""
    temperatures = [of_row[row].temperature for row in rows]
    drawn = torch.tensor([number for number, temperature in enumerate(temperatures) if temperature], dtype=torch.long)
    scale_B1 = torch.tensor(temperatures)[drawn, None]
    noise_BV = torch.empty(len(drawn), logits_BV.shape[1]).exponential_().log_().neg_()
    logits_BV.index_add_(0, drawn, scale_B1 * noise_BV)
    chosen: list[int] = logits_BV.argmax(-1).tolist()
    return chosen


def _make_row(question: Question, max_new_tokens: int) -> SequenceState:
    rng = SeededRandomSource(0, question.number)
    tokens = list(question.tokens)
    return SequenceState(question.number, "", question.dataset, "", tokens, len(tokens), [0], rng, max_new_tokens)
