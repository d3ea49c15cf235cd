"""Whether greedy answers under load are the target's own: plain decoding by `transformers`, token for token."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline.bench_serve_client import Outcome
from pipeline.build_models import load_models, locate
from pipeline.config import Config
from pipeline.serve_build import make_conversation
from stages.baselines import Request as Task
from stages.baselines import plain, preference
from stages.distributions import Sampling
from stages.huggingface import load_causal_model
from stages.vocabulary import Vocabulary
from store.registry import default_uri

ROWS = 8  # prompts that the reference completes together
SHOWN = 40  # characters of a prompt
Ids = tuple[int, ...]  # of a prompt


@dataclass(frozen=True)
class Difference:
    """An answer that is not the target's own.

    Attributes:
        number: of the request.
        place: the first token that differs.
        expected: that token's text by plain decoding; empty behind its end.
        got: the answer's text from there on, its beginning.
        margin: by how much the target's logit of the expected token is above that of the other; about 0 is a near tie,
            which rounding may decide either way. None where one text only ends before the other.
    """

    number: int
    prompt: str
    place: int
    expected: str
    got: str
    margin: float | None


@dataclass(frozen=True)
class Verified:
    """How many greedy answers, to how many prompts, were compared, and which differ."""

    answers: int
    prompts: int
    tokens: int
    differing: list[Difference]


class Reference:
    """Plain greedy decoding of a target.

    Args:
        config: names the target, and what is needed to make prompts of conversations.
        scratch: an existing folder, for models that have to be fetched.
    """

    def __init__(self, config: Config, scratch: Path) -> None:
        uri = config.publish.mlflow_uri or default_uri(Path("runs"))
        (models,) = load_models(config, uri, scratch)
        self._conversation = make_conversation(config, models, lambda _: None)
        self.words: Vocabulary = models.target_words
        ends = models.target.ends or {token for token in (models.target_words.eos,) if token is not None}
        self.ends, self._longest = frozenset(ends), models.target.max_length
        source = locate(models.name, uri, scratch / "target")
        self.target: Any = load_causal_model(source, config.dtype, str(models.target.device))

    def encode(self, chat: bool, text: str) -> Sequence[int]:
        """A prompt in the target's ids."""
        if not chat:
            return self.words.encode(text)
        return self._conversation.encode_conversation([{"role": "user", "content": text}])[0]

    def complete(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        """Completions of up to `most` tokens, the end of a sequence included, cut to the room in the context."""
        room = self._longest - max(map(len, prompts))
        task = Task(Sampling(0.0), min(most, room), self.ends, seed=0)
        return plain(self.target, prompts, task)

    def shown(self, tokens: Sequence[int]) -> str:
        """The text of a completion: what ends the sequence is no part of it."""
        return self.words.decode(tokens[:-1] if tokens and tokens[-1] in self.ends else tokens)


def verify(outcomes: Sequence[Outcome], reference: Reference, progress: Callable[[int, int], None]) -> Verified:
    """Compare every greedy answer that came whole. A shorter answer is compared with the beginning of a longer one's.

    Args:
        progress: is told the prompts that are decoded, and all of them.
    """
    greedy = [one for one in outcomes if _is_comparable(one)]
    keys = {(one.request.chat, one.request.prompt) for one in greedy}
    ids = {key: tuple(reference.encode(*key)) for key in keys}  # a chat and a text may be the same to the model
    longest: dict[Ids, int] = {}
    for one in greedy:
        prompt = ids[one.request.chat, one.request.prompt]
        longest[prompt] = max(longest.get(prompt, 0), one.request.max_tokens)
    wanted = dict(_decoded(longest, reference, progress))
    differing = []
    for one in greedy:
        prompt = ids[one.request.chat, one.request.prompt]
        if found := _difference(one, prompt, wanted[prompt], reference):
            differing.append(found)
    return Verified(len(greedy), len(longest), sum(one.tokens or 0 for one in greedy), differing)


def _is_comparable(outcome: Outcome) -> bool:
    greedy, whole = outcome.request.temperature == 0, outcome.finish in ("stop", "length")
    return greedy and whole and outcome.error is None and outcome.tokens is not None


def _decoded(
    longest: dict[Ids, int], reference: Reference, progress: Callable[[int, int], None]
) -> Iterator[tuple[Ids, list[int]]]:
    """Each prompt with its completion. Prompts of about one length are decoded together."""
    rest, done = iter(sorted(longest, key=lambda prompt: (longest[prompt], len(prompt)))), 0
    while chunk := list(islice(rest, ROWS)):
        yield from zip(chunk, reference.complete(chunk, max(map(longest.__getitem__, chunk))), strict=True)
        progress(done := done + len(chunk), len(longest))


def _difference(outcome: Outcome, prompt: Ids, completion: list[int], reference: Reference) -> Difference | None:
    wanted = completion[: outcome.request.max_tokens]
    if outcome.text == reference.shown(wanted) and outcome.tokens == len(wanted):
        return None
    place = _first_difference(outcome.text, wanted, reference)
    rest = outcome.text[len(reference.words.decode(wanted[:place])) :]
    margin = _margin(reference, [*prompt, *wanted[:place]], wanted[place], rest) if place < len(wanted) else None
    expected = reference.words.decode(wanted[place : place + 1])
    return Difference(outcome.request.number, outcome.request.prompt[:SHOWN], place, expected, rest[:SHOWN], margin)


def _first_difference(text: str, wanted: Sequence[int], reference: Reference) -> int:
    """The token from which on the text is another; all of them if it only goes on behind them."""
    spoken = range(len(wanted) - (wanted[-1] in reference.ends), 0, -1)
    return next((place for place in spoken if text.startswith(reference.words.decode(wanted[:place]))), 0)


def _margin(reference: Reference, text: Sequence[int], expected: int, rest: str) -> float | None:
    """Against the likeliest token that the rest of an answer may begin with; against the ends, if there is no rest."""
    begins = rest.encode()[:SHOWN]
    found = (reference.words.id_of_bytes.get(begins[:length]) for length in range(1, len(begins) + 1))
    others = [other for other in found if other is not None] if rest else sorted(reference.ends)
    margins = [preference(reference.target, text, expected, other) for other in others if other != expected]
    return min(margins, default=None)
