"""Chat prompts: a user's message in the target's chat template, as ids of the target and as pieces of the drafter.

The template's markers become special tokens; what the user wrote stays text, whatever it looks like.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from stages.pair import How, Pair
from stages.vocabulary import Vocabulary
from store.errors import ConfigError

Segment = int | str  # the id of a special token of the target, or a run of text

STAND_IN = "\ue000message\ue000"  # stands where the message will: private characters that no template contains


@dataclass(frozen=True)
class _Marker:
    """A special token as a template writes it. `lstrip` and `rstrip`: it swallows white space on that side."""

    token: int
    lstrip: bool
    rstrip: bool
    single_word: bool

    def span(self, text: str, start: int, stop: int) -> tuple[int, int] | None:
        """What it takes of a text in which its name lies at `start:stop`; None where a word goes on beside it."""
        if self.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[stop : stop + 1])):
            return None
        if self.lstrip:
            start = len(text[:start].rstrip())
        if self.rstrip:
            stop = len(text) - len(text[stop:].lstrip())
        return start, stop


def _is_word(character: str) -> bool:
    return re.fullmatch(r"\w", character) is not None


class ChatTemplate:
    """The chat template of one tokenizer, prepared once and applied to every message.

    Args:
        words: the vocabulary; its tokenizer renders the template.
        template: Jinja text to use instead of the tokenizer's own.

    Raises:
        ConfigError: there is no template, it cannot be rendered, or it does not show the user's message once.
    """

    def __init__(self, words: Vocabulary, template: str | None = None) -> None:
        self._words, self._template = words, template
        if template is None and not words.tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer of {words.name} must have a chat template, but has none; "
                "name a Jinja file with source.chat_template=FILE."
            )
        added = words.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._markers = {
            name: _Marker(token, added[token].lstrip, added[token].rstrip, added[token].single_word)
            for name, token in words.specials.items()
            if token in added  # the tokenizer reads no other name as a token
        }
        # Longest first: where one name begins with another, the tokenizer takes the longer.
        names = sorted(self._markers, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._around()

    def segments(self, message: str) -> list[Segment]:
        """The rendered prompt, cut at the template's special tokens. Its last line asks for the answer.

        Raises:
            ConfigError: the template writes something else around this message than around others.
        """
        before, after = self._around()
        text = self._render(message)
        if not (text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)):
            raise ConfigError(
                f"The chat template of {self._words.name} must write the same around every message, but does not "
                f"around {message[:60]!r}; simplify it, or leave --chat out."
            )
        return list(self._cut(text, len(before), len(text) - len(after)))

    def _cut(self, text: str, begin: int, end: int) -> Iterator[Segment]:
        """Special tokens and the runs between them. Names in `begin:end`, the message, are not looked at."""
        done = 0
        for found in (*self._names.finditer(text, 0, begin), *self._names.finditer(text, end)):
            marker = self._markers[found[0]]
            span = marker.span(text, *found.span())
            if span is None:
                continue
            if done < span[0]:  # white space may have gone to the marker before
                yield text[done : span[0]]
            yield marker.token
            done = span[1]
        if done < len(text):
            yield text[done:]

    def _around(self) -> tuple[str, str]:
        """What the template writes before and behind the message. Rendered anew: it may hold the date."""
        parts = self._render(STAND_IN).split(STAND_IN)
        if len(parts) != 2:
            raise ConfigError(
                f"The chat template of {self._words.name} must show the user's message once and unchanged, "
                f"but shows it {len(parts) - 1} times; name another with source.chat_template=FILE."
            )
        return parts[0], parts[1]

    def _render(self, message: str) -> str:
        conversation = [{"role": "user", "content": message}]
        try:
            rendered: str = self._words.tokenizer.apply_chat_template(
                conversation, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"The chat template of {self._words.name} must render one user message, but: {reason}; "
                "mend it, or name another with source.chat_template=FILE."
            ) from error
        return rendered


class ChatEncoder:
    """Messages to prompts, for one target and one drafter.

    Args:
        target, drafter: the two vocabularies.
        pair: how the target's special tokens are mapped.
        template: Jinja text to use instead of the target's own chat template.

    Raises:
        ConfigError: as `ChatTemplate`.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary, pair: Pair, template: str | None = None) -> None:
        self.template = ChatTemplate(target, template)
        self._target, self._drafter = target, drafter
        self._mapped = {mapping.token: mapping for mapping in pair.specials}
        self._begin = drafter.encode("")  # BOS, where the drafter's tokenizer adds it

    def encode(self, message: str) -> tuple[list[int], list[int]]:
        """The target's ids and the drafter's pieces of a message's prompt.

        The target's are those of `apply_chat_template(..., tokenize=True)` wherever the message holds no name of a
        special token. The drafter reads the same text cut its own way. A special token is there the drafter's
        of the same role or name, or its name written out, or, where the pair blocks it, nothing but a line break
        between words that would run together. BOS comes first where the drafter's tokenizer adds it, and once.

        Raises:
            ConfigError: as `ChatTemplate.segments`.
        """
        segments = self.template.segments(message)
        tokens = _joined(segments, self._target)
        pieces = _joined(list(self._for_drafter(segments)), self._drafter)
        return tokens, pieces if pieces[: len(self._begin)] == self._begin else self._begin + pieces

    def _for_drafter(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        """The same with the drafter's special tokens; text that now touches is one run."""
        run, blocked = "", False
        for segment in segments:
            mapping = self._mapped[segment] if isinstance(segment, int) else None
            if mapping is None or mapping.how is How.SPELT:
                text = str(segment) if mapping is None else mapping.name
                run += "\n" + text if blocked and _is_word(run[-1:]) and _is_word(text[:1]) else text
            elif mapping.how is not How.BLOCKED:
                yield from ([run] if run else [])
                yield from mapping.pieces
                run = ""
            blocked = mapping is not None and mapping.how is How.BLOCKED
        yield from ([run] if run else [])


def _joined(segments: Sequence[Segment], words: Vocabulary) -> list[int]:
    ids: list[int] = []
    for place, segment in enumerate(segments):
        ids += [segment] if isinstance(segment, int) else words.encode_text(segment, first=place == 0)
    return ids
