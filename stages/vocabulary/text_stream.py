"""Streams the text of emitted tokens: whole characters only, up to the first stop string.

The search works on bytes, so that tokens may end anywhere, also inside a character. The stop string that is complete
first ends the text: of "bc" and "abcd" it is "bc", for any tokens. Of several that are complete with the same byte the
longest one counts, so that no part of a stop string is shown. Only emitted text is searched, not the prompt. A U+FFFD
for broken bytes does not match a stop string.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from store.errors import ConfigError

BytesOf = Callable[[int], bytes | None]  # the bytes that a token stands for; None for one that is no text, such as EOS
Token = TypeVar("Token")


def _encode_stops(stops: Sequence[str]) -> list[bytes]:
    try:
        encoded = [stop.encode() for stop in stops]
    except UnicodeEncodeError as error:
        raise ConfigError(f"a stop string must be text that has a UTF-8 form, but: {error}") from error
    if not all(encoded):
        raise ConfigError("a stop string must not be empty: every text would end before it began; leave it out")
    return encoded


def _find_first(text: bytes, stops: Sequence[bytes]) -> int | None:
    """Return the index at which the stop string begins that is complete first."""
    found = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(found)[1] if found else None


class StopStrings:
    """Finds the token that completes a stop string. Keeps one byte fewer than the longest stop string has. Raises
    `ConfigError` if a stop string is empty, or has no UTF-8 form (a lone surrogate).

    >>> stop = StopStrings({1: b"so ", 2: b"lo", 3: b"ng"}.get, ["long"])
    >>> stop.find_end([1, 2]), stop.find_end([3, 1])
    (None, 1)
    """

    def __init__(self, bytes_of: BytesOf, stops: Sequence[str]) -> None:
        self._bytes_of, self._stops = bytes_of, _encode_stops(stops)
        self._kept = max(map(len, self._stops), default=1) - 1
        self._tail = b""
        self.complete = False  # whether one was found

    def find_end(self, tokens: Iterable[int]) -> int | None:
        """Return the number of new tokens up to the one that completes a stop string, or None.

        Do not call it again after a stop string was complete: later tokens count as not emitted.
        """
        for number, token in enumerate(tokens, start=1):
            text = self._tail + (self._bytes_of(token) or b"")
            if _find_first(text, self._stops) is not None:
                self.complete = True
                return number
            self._tail = text[max(0, len(text) - self._kept) :]
        return None


class TextStream(Generic[Token]):
    """The text of emitted tokens for a client, up to the first stop string.

    The concatenated output is `Vocabulary.decode` of all tokens before that stop string, for any division into blocks.
    Without stop strings only incomplete characters are held back. Raises `ConfigError` if a stop string is empty, or
    has no UTF-8 form (a lone surrogate).

    >>> euro = TextStream({7: b" \\xe2\\x82", 8: b"\\xac"}.get)
    >>> [euro.push([7]), euro.push([8]), euro.push([7]), euro.close()]
    [' ', '€', ' ', '\N{REPLACEMENT CHARACTER}']
    >>> text = TextStream({1: b"so ", 2: b"lo", 3: b"ng"}.get, ["long"])
    >>> [text.push([1, 2]), text.push([2]), text.push([3, 1]), text.close()]
    ['so ', 'lo', '', '']
    """

    def __init__(self, bytes_of: Callable[[Token], bytes | None], stops: Sequence[str] = ()) -> None:
        self._bytes_of, self._stops = bytes_of, _encode_stops(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self.stopped = False  # whether a stop string was found; no more text is returned then

    def push(self, tokens: Iterable[Token]) -> str:
        """Add tokens and return the new complete characters that cannot belong to a stop string.

        Bytes that can no longer become a character are U+FFFD immediately.
        """
        if self.stopped:
            return ""
        text = self._held + b"".join(self._bytes_of(token) or b"" for token in tokens)
        begin = _find_first(text, self._stops)
        self.stopped = begin is not None
        if begin is None:  # what may be the beginning of a stop string is held back
            beginnings = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
            certain = len(text) - max((len(one) for one in beginnings if text.endswith(one)), default=0)
        else:
            certain = begin
        self._held = text[certain:]
        return self._decoder.decode(text[:certain], final=self.stopped)

    def close(self, *, cut: bool = False) -> str:
        """Return the held-back text after the last token, unless a stop string was found. An incomplete character is
        U+FFFD, or left out of a text that was `cut`, whose next token might complete it.

        Without stop strings the next push begins a new text.
        """
        left = "" if self.stopped else self._decoder.decode(self._held, final=not cut)
        self._decoder.reset()
        self._held = b""
        return left
