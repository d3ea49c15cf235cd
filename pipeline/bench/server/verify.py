"""Compares greedy answers under load with plain decoding by `transformers`, token by token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.assembly.models import load_only_target, locate, registry_uri
from pipeline.bench.server.client import Outcome
from pipeline.config.settings import Config
from pipeline.serve.run import make_conversation
from stages.engine.models.huggingface import load_causal_model, logit_difference
from stages.sampling.params import SamplingParams
from stages.tools.transformers_baselines import Request, greedy_generate

if TYPE_CHECKING:
    from stages.vocabulary.tokenizer_view import Vocabulary

ROWS = 8  # batch size of the reference
SHOWN = 40  # characters decode of a prompt or an answer
Ids = tuple[int, ...]  # a prompt in target tokens


@dataclass(frozen=True)
class Difference:
    """An answer that differs from plain decoding.

    Attributes:
        number: number of the request.
        prompt: beginning of the prompt.
        place: position of the first token that differs.
        expected: text of that token by plain decoding; empty if plain decoding ends before it.
        got: beginning of the answer's text from that position on.
        margin: the target's logit of the expected token minus that of the other token. A value near 0 is a near tie,
            which rounding may decide either way. None if one text is the beginning of the other.
    """

    number: int
    prompt: str
    place: int
    expected: str
    got: str
    margin: float | None


@dataclass(frozen=True)
class Verification:
    """Result of the comparison.

    Attributes:
        answers, prompts, tokens: numbers of greedy answers, distinct prompts and answer tokens compared.
        differing: answers that differ from plain decoding.
    """

    answers: int
    prompts: int
    tokens: int
    differing: list[Difference]


class Reference:
    """Plain greedy decoding of a target.

    Args:
        config: settings that name the target and its chat template.
        scratch: an existing folder for downloaded models.
    """

    def __init__(self, config: Config, scratch: Path) -> None:
        models = load_only_target(config, scratch)
        self._conversation = make_conversation(config.source, models)
        self.words: Vocabulary = models.target_vocabulary
        self.eos_ids, self._longest = models.eos_ids, models.target.max_length
        source = locate(models.name, registry_uri(config), scratch / "target")
        self.target: Any = load_causal_model(source, config.dtype, str(models.target.device))

    def encode(self, chat: bool, text: str) -> Sequence[int]:
        """Encode a text, or a chat with one message, in target tokens."""
        if not chat:
            return self.words.encode(text)
        return self._conversation.encode_conversation([{"role": "user", "content": text}])[0]

    def complete(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        """Greedy completions of up to `most` tokens, end of sequence included, within the context length."""
        remaining = self._longest - max(map(len, prompts))
        return greedy_generate(
            self.target, prompts, Request(SamplingParams(0.0), min(most, remaining), self.eos_ids, seed=0)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion without its end-of-sequence token."""
        return self.words.decode(tokens[:-1] if tokens and tokens[-1] in self.eos_ids else tokens)


def verify(outcomes: Sequence[Outcome], reference: Reference, progress: Callable[[int, int], None]) -> Verification:
    """Compare every complete greedy answer with plain decoding, which runs once per prompt at the longest length.

    Args:
        outcomes: outcomes of all requests.
        reference: plain decoding of the target.
        progress: called with the number of decoded prompts and of all prompts.
    """
    greedy = [one for one in outcomes if _is_comparable(one)]
    keys = {(one.request.chat, one.request.prompt) for one in greedy}
    ids = {key: tuple(reference.encode(*key)) for key in keys}  # a chat and a text may be the same to the model
    longest: dict[Ids, int] = {}
    for one in greedy:
        prompt = ids[one.request.chat, one.request.prompt]
        longest[prompt] = max(longest.get(prompt, 0), one.request.max_tokens)
    wanted = dict(_decode_all(longest, reference, progress))
    differing = []
    for one in greedy:
        prompt = ids[one.request.chat, one.request.prompt]
        if found := _difference(one, prompt, wanted[prompt], reference):
            differing.append(found)
    return Verification(len(greedy), len(longest), sum(one.tokens or 0 for one in greedy), differing)


def _is_comparable(outcome: Outcome) -> bool:
    greedy, whole = outcome.request.temperature == 0, outcome.finish in ("stop", "length")
    return greedy and whole and outcome.error is None and outcome.tokens is not None


def _decode_all(
    longest: dict[Ids, int], reference: Reference, progress: Callable[[int, int], None]
) -> Iterator[tuple[Ids, list[int]]]:
    """Each prompt with its completion. Prompts of similar length are decoded in one batch."""
    rest, done = iter(sorted(longest, key=lambda prompt: (longest[prompt], len(prompt)))), 0
    while chunk := list(islice(rest, ROWS)):
        yield from zip(chunk, reference.complete(chunk, max(map(longest.__getitem__, chunk))), strict=True)
        progress(done := done + len(chunk), len(longest))


def _difference(outcome: Outcome, prompt: Ids, completion: list[int], reference: Reference) -> Difference | None:
    wanted = completion[: outcome.request.max_tokens]
    if outcome.text == reference.decode(wanted) and outcome.tokens == len(wanted):
        return None
    place = _first_difference(outcome.text, wanted, reference)
    rest = outcome.text[len(reference.words.decode(wanted[:place])) :]
    margin = _margin(reference, [*prompt, *wanted[:place]], wanted[place], rest) if place < len(wanted) else None
    expected = reference.words.decode(wanted[place : place + 1])
    return Difference(outcome.request.number, outcome.request.prompt[:SHOWN], place, expected, rest[:SHOWN], margin)


def _first_difference(text: str, wanted: Sequence[int], reference: Reference) -> int:
    """Position of the first token that the text does not match; the number of tokens if the text only continues."""
    spoken = range(len(wanted) - (wanted[-1] in reference.eos_ids), 0, -1)
    return next((place for place in spoken if text.startswith(reference.words.decode(wanted[:place]))), 0)


def _margin(reference: Reference, text: Sequence[int], expected: int, rest: str) -> float | None:
    """Margin to the most likely token that `rest` may begin with; to end of sequence if `rest` is empty."""
    begins = rest.encode()[:SHOWN]
    found = (reference.words.id_of_bytes.get(begins[:length]) for length in range(1, len(begins) + 1))
    others = [other for other in found if other is not None] if rest else sorted(reference.eos_ids)
    margins = [logit_difference(reference.target, text, expected, other) for other in others if other != expected]
    return min(margins, default=None)
