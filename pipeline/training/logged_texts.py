"""Reads the texts of runs from their logs, and puts them into the tokens of a target."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.assembly.admission import Admission
from pipeline.assembly.models import Models
from pipeline.config.settings import Config
from stages.learn.examples.teacher_forcing import CompletedText
from stages.vocabulary.tokenizer_view import Vocabulary
from store.events import PromptReceived
from store.log.manifest import RunKind, read_manifest
from store.query.log_reader import LogReader

_TEXTS = """
    WITH emitted AS (
        SELECT "offset", list(emitted_id ORDER BY position) AS ids
        FROM decisions WHERE emitted_id IS NOT NULL GROUP BY "offset"
    )
    SELECT "offset", prompt_id, dataset, target, prompt_text, completion_text, finish, prompt_tokens, ids
    FROM prompts JOIN emitted USING ("offset")
    WHERE finish IN ('stop', 'length') AND prompt_text <> ''
    ORDER BY "offset" {newest}
"""
_TOKENS = "SELECT DISTINCT target, emitted_id, emitted_bytes FROM decisions WHERE emitted_id IS NOT NULL"


@dataclass(frozen=True)
class LoggedCompletion:
    """A completed prompt of a log."""

    prompt: PromptReceived  # the prompt as it was received
    target: str  # name of the target that completed it
    completion: str  # text of the completion
    stopped: bool  # whether it ended by itself
    prompt_tokens: int  # number of the prompt's tokens in the target's vocabulary
    emitted: tuple[int, ...]  # the completion in that target's tokens


@dataclass(frozen=True)
class RunTexts:
    """The texts of one run."""

    folder: Path  # of the run
    completions: tuple[LoggedCompletion, ...]  # in stream order
    # per target the ids that it emitted, with their bytes; None for special ones
    tokens: dict[str, dict[int, bytes | None]]
    served: bool  # whether the prompts are requests to a server, of which the log holds the whole text


def read_run_texts(folder: Path, newest: int | None = None) -> RunTexts:
    """Read the completed prompts of a run; requests that were cancelled, and prompts without text, are left out. Only
    the `newest` prompts are read, all if it is None.
    """
    with LogReader([folder]) as log:
        rows = log.select(_TEXTS.format(newest=f"DESC LIMIT {newest}" if newest else "")).to_pylist()
        emitted = log.select(_TOKENS).to_pylist()
    tokens: dict[str, dict[int, bytes | None]] = {}
    for row in emitted:
        tokens.setdefault(row["target"], {})[row["emitted_id"]] = row["emitted_bytes"]
    completions = (
        LoggedCompletion(
            PromptReceived(row["offset"], row["prompt_id"], row["dataset"], row["offset"] + 1, row["prompt_text"]),
            row["target"],
            row["completion_text"],
            row["finish"] == "stop",
            row["prompt_tokens"],
            tuple(row["ids"]),
        )
        for row in sorted(rows, key=lambda row: int(row["offset"]))
    )
    return RunTexts(folder, tuple(completions), tokens, read_manifest(folder).kind in (RunKind.SERVE, RunKind.ENGINE))


class TextEncoder:
    """Puts logged texts into the tokens of a target and the pieces of a drafter.

    Texts of a target with the same vocabulary keep their tokens; the completions of others are tokenized again. A
    prompt that is not the logged one in tokens is left out: of a conversation with a server, the log has the text but
    not the control tokens of the chat template.
    """

    def __init__(self, models: Models) -> None:
        self._models, self._limits = models, (models.target.max_length, models.drafter.max_length)
        self.left_out: Counter[str] = Counter()  # number of texts by the reason for which they were left out

    def encode_run(self, texts: RunTexts, config: Config) -> Iterator[CompletedText]:
        """Yield the texts of a run; their offsets are those in the run. The run's configuration determines how its
        prompts were put into a chat template.
        """
        chat = {"source.chat": False} if texts.served else {}
        own = config.with_overrides({"targets": (self._models.name,), "swaps": (), **chat})
        encode = Admission(own, self._models).encode
        vocabulary = self._models.target_vocabulary
        same = {name: has_tokens(vocabulary, tokens) for name, tokens in texts.tokens.items()}
        for completion in texts.completions:
            tokens, pieces = encode(completion.prompt)
            if same[completion.target]:
                if len(tokens) != completion.prompt_tokens:
                    self.left_out["the prompt's control tokens are not in the log"] += 1
                    continue
                emitted = completion.emitted
            else:
                ids, eos = vocabulary.encode_text(completion.completion, first=False), vocabulary.eos
                emitted = tuple([*ids, eos] if completion.stopped and eos is not None else ids)
            text = CompletedText(completion.prompt.offset, tuple(tokens), tuple(pieces), emitted)
            if self._is_usable(text):
                yield text

    def _is_usable(self, text: CompletedText) -> bool:
        if not text.prompt or not text.emitted or not text.prompt_pieces:
            self.left_out["the prompt or the completion has no tokens"] += 1
            return False
        pieces = len(text.prompt_pieces) + sum(len(self._models.pair.context[token]) for token in text.emitted)
        lengths = len(text.prompt) + len(text.emitted), pieces
        if any(length > most for length, most in zip(lengths, self._limits, strict=True)):
            self.left_out["the text is longer than a model's context"] += 1
            return False
        return True


def has_tokens(vocabulary: Vocabulary, tokens: dict[int, bytes | None]) -> bool:
    """Whether all these ids have these bytes in a vocabulary."""
    return all(token < vocabulary.size and vocabulary.bytes_of(token) == found for token, found in tokens.items())


def split_by_prompt(texts: Sequence[CompletedText], share: float, most: int) -> tuple[list[int], list[int]]:
    """Return the indices of the texts to train on, and of those to hold out.

    Every n-th distinct prompt is held out with all its completions, so that no held-out prompt is also trained on. The
    texts are in stream order; held out is a share of the distinct prompts, above 0 and at most a half, but `most`
    prompts at most.

    >>> prompts = [(1,), (2,), (1,), (3,), (4,)]
    >>> split_by_prompt([CompletedText(0, prompt, (1,), (9,)) for prompt in prompts], share=0.5, most=2)
    ([0, 2, 3], [1, 4])
    """
    numbers: dict[tuple[int, ...], int] = {}
    for text in texts:
        numbers.setdefault(text.prompt, len(numbers))
    every = max(2, min(len(numbers), max(round(1 / share), -(-len(numbers) // most))))
    is_held = [numbers[text.prompt] % every == every - 1 for text in texts]
    return [i for i, held in enumerate(is_held) if not held], [i for i, held in enumerate(is_held) if held]
