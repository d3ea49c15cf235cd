"""Log probabilities of a choice, in the two forms of OpenAI's interface."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stages.logprobs import TokenLogprobs

LEAST = -9999.0  # what OpenAI's interface says for a probability of zero
BytesOf = Callable[[int], bytes]  # of a token


@dataclass(frozen=True)
class Scored:
    """A token's log probabilities and the place in the choice's text, in characters, where it begins."""

    token: TokenLogprobs
    offset: int


class Offsets:
    """Knows where tokens begin, and keeps those back whose text has not come yet.

    A token that begins inside a character begins where that character does. The text may end before tokens that were
    emitted: they made up a stop string or the end of the sequence, and are not shown.
    """

    def __init__(self, bytes_of: BytesOf, begin: int) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._next = self._shown = begin
        self._waiting: list[Scored] = []

    def push(self, tokens: Sequence[TokenLogprobs], text: str, last: bool, cut: bool) -> list[Scored]:
        """The tokens that `text`, which came with `tokens`, shows now. If it is the `last`, all unless it was `cut`."""
        for token in tokens:
            self._waiting.append(Scored(token, self._next))
            self._next += len(self._decoder.decode(self._bytes_of(token.token)))
        self._shown += len(text)
        if last and not cut:
            ready = self._waiting
        else:
            ready = [scored for scored in self._waiting if scored.offset < self._shown]
        self._waiting = self._waiting[len(ready) :]
        return ready


def chat_logprobs(scored: Sequence[Scored], bytes_of: BytesOf) -> dict[str, Any]:
    """As in chats: each token with its bytes and its alternatives."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelt = bytes_of(token)
        return {"token": name_of(spelt, ""), "bytes": list(spelt), "logprob": max(logprob, LEAST)}

    content = [
        {**one(entry.token.token, entry.token.logprob), "top_logprobs": [one(*other) for other in entry.token.top]}
        for entry in scored
    ]
    return {"content": content, "refusal": None}


def plain_logprobs(scored: Sequence[Scored], bytes_of: BytesOf) -> dict[str, Any]:
    """As in plain completions: parallel lists; the alternatives include the token itself."""

    def name(token: int) -> str:
        return name_of(bytes_of(token), "bytes:")

    def top(token: TokenLogprobs) -> dict[str, float]:
        own = {name(token.token): max(token.logprob, LEAST)}
        return {name(other): max(logprob, LEAST) for other, logprob in token.top} | own

    return {
        "tokens": [name(entry.token.token) for entry in scored],
        "token_logprobs": [max(entry.token.logprob, LEAST) for entry in scored],
        "top_logprobs": [top(entry.token) for entry in scored],
        "text_offset": [entry.offset for entry in scored],
    }


def name_of(spelt: bytes, mark: str) -> str:
    r"""A token as text. One that is not whole characters is written byte by byte, behind a mark.

    >>> name_of(b" the", ""), name_of(b"\xe2\x82", "bytes:")
    (' the', 'bytes:\\xe2\\x82')
    """
    try:
        return spelt.decode("utf-8")
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in spelt)
