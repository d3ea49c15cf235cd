"""A target's chat template: conversations as runs of text and special tokens.

The template's markers become special tokens; what people wrote stays text, whatever it looks like.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from stages.vocabulary import Vocabulary
from store.errors import ConfigError

Segment = int | str  # the id of a special token of the target, or a run of text
Message = Mapping[str, str]  # `role` and `content`

ROLES = ("system", "developer", "user", "assistant", "tool")  # a template writes them out, so no others may come
THOUGHT = "</think>"  # the end of a reasoning model's thoughts, which its template leaves out of earlier answers
STAND_IN = "\ue000{}\ue000"  # stands where a content will: private characters that no template contains
_STAND_INS = re.compile("\ue000([0-9]+)\ue000")


@dataclass(frozen=True)
class _Marker:
    """A special token as a template writes it. `lstrip` and `rstrip`: it swallows white space on that side."""

    token: int
    lstrip: bool
    rstrip: bool
    single_word: bool

    def span(self, text: str, start: int, stop: int) -> tuple[int, int] | None:
        """What it takes of a text in which its name lies at `start:stop`; None where a word goes on beside it."""
        if self.single_word and (is_word(text[start - 1 : start]) or is_word(text[stop : stop + 1])):
            return None
        while self.lstrip and start and text[start - 1].isspace():
            start -= 1
        while self.rstrip and text[stop : stop + 1].isspace():
            stop += 1
        return start, stop


@dataclass(frozen=True)
class _Frame:
    """What a template writes around contents: `parts[i]`, the content of message `order[i]`, `parts[i + 1]`, ..."""

    parts: tuple[str, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class _Way:
    """One way to read a text up to a place: the last content lies at `start:stop`, the ones before it as `before`."""

    before: "_Way | None"
    start: int
    stop: int

    def spans(self) -> list[tuple[int, int]]:
        """Of all contents, the first one first."""
        found, way = [], self
        while way.before is not None:
            found.append((way.start, way.stop))
            way = way.before
        return found[::-1]


class ChatTemplate:
    """The chat template of one tokenizer, prepared once and applied to every conversation.

    Args:
        words: the vocabulary; its tokenizer renders the template.
        template: Jinja text to use instead of the tokenizer's own.

    Raises:
        ConfigError: there is no template, it cannot be rendered, or it does not show a user's message once.
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
        self._frame(["user"])

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """The rendered conversation, cut at the template's special tokens. Its last line asks for the answer.

        The template is rendered twice, once with stand-ins for the contents. What it wrote around those must lie
        around the contents too, each as given, without white space at its ends, or without its thoughts.

        Args:
            messages: what has been said, each with a role of `ROLES`; what else they hold is not looked at.

        Raises:
            ConfigError: the template refuses these messages, leaves one out, or changes a content.
        """
        roles = [message["role"] for message in messages]
        _check(roles)
        frame = self._frame(roles)  # rendered anew each time: it may hold the date
        text = self._render(roles, [message["content"] for message in messages])
        return list(self._cut(text, self._spans(text, frame, messages)))

    def _frame(self, roles: Sequence[str]) -> _Frame:
        split = _STAND_INS.split(self._render(roles, [STAND_IN.format(place) for place in range(len(roles))]))
        order = tuple(map(int, split[1::2]))
        times = Counter(order)
        for place, role in enumerate(roles):
            if times[place] != 1:
                raise ConfigError(
                    f"The chat template of {self._words.name} must show every message once and unchanged, but shows "
                    f"the content of message {place + 1}, role '{role}', {times[place]} times; "
                    "leave such a message out, or name another template with source.chat_template=FILE."
                )
        return _Frame(tuple(split[::2]), order)

    def _spans(self, text: str, frame: _Frame, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Where the contents lie in the text, in the order of the text."""
        # The ways to read the text so far, by where they end: white space may be a content's or the template's.
        ways = {len(frame.parts[0]): _Way(None, 0, 0)} if text.startswith(frame.parts[0]) else {}
        for place, behind in zip(frame.order, frame.parts[1:], strict=True):
            ways = {
                start + len(form) + len(behind): _Way(way, start, start + len(form))
                for start, way in ways.items()
                for form in _forms(messages[place])
                if text.startswith(form + behind, start)
            }
            if not ways:
                raise self._unlike(messages[place])
        if len(text) not in ways:
            raise self._unlike(messages[frame.order[-1]])
        return ways[len(text)].spans()

    def _unlike(self, message: Message) -> ConfigError:
        return ConfigError(
            f"The chat template of {self._words.name} must write every message's content as it is, and the same around "
            f"it whatever it says, but does not with {message['content'][:60]!r}; change the message or the template."
        )

    def _cut(self, text: str, contents: Sequence[tuple[int, int]]) -> Iterator[Segment]:
        """Special tokens and the runs between them. Names in the contents are not looked at."""
        edges = [0, *chain.from_iterable(contents), len(text)]
        around = zip(edges[::2], edges[1::2], strict=True)
        done = 0
        for found in chain.from_iterable(self._names.finditer(text, *part) for part in around):
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

    def _render(self, roles: Sequence[str], contents: Sequence[str]) -> str:
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            rendered: str = self._words.tokenizer.apply_chat_template(
                messages, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of its author's, and may fail in any way
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            shown = ", ".join(roles[:9]) + (", ..." if len(roles) > 9 else "")
            raise ConfigError(
                f"The chat template of {self._words.name} must render a conversation of the roles {shown}, "
                f"but: {reason}; change the conversation, or name another template with source.chat_template=FILE."
            ) from error
        return rendered


def _check(roles: Sequence[str]) -> None:
    wrong = next((role for role in roles if role not in ROLES), None)
    if wrong is not None or not roles:
        got = "none" if wrong is None else f"one of the role {wrong[:30]!r}"
        raise ConfigError(f"A conversation must hold messages of the roles {', '.join(ROLES)}, got {got}.")


def _forms(message: Message) -> Iterator[str]:
    """What a template may show of a content."""
    content = message["content"]
    told = content.rpartition(THOUGHT)[2] if message["role"] == "assistant" else content
    for whole in dict.fromkeys([content, told]):
        for begun in dict.fromkeys([whole, whole.lstrip("\n"), whole.lstrip()]):
            yield from dict.fromkeys([begun, begun.rstrip("\n"), begun.rstrip()])


def is_word(character: str) -> bool:
    """Whether a character, or nothing, is one that words are made of."""
    return re.fullmatch(r"\w", character) is not None
