"""Stop strings: where a row ends because of one, and the text in front of it.

Both are found in bytes, so that tokens may be cut anywhere, also inside a character. What is complete first ends the
text: of "bc" and "abcd" it is "bc", whatever the tokens. Of several that are complete with the same byte the longest
counts, so that nothing of a stop string is ever shown. Stop strings are looked for in what is emitted alone, not in
the prompt. A U+FFFD that stands for broken bytes is no character of a stop string.
"""

from collections.abc import Callable, Iterable, Sequence

from stages.text_stream import TextStream
from store.errors import ConfigError

BytesOf = Callable[[int], bytes | None]  # the bytes that a token stands for; None for one that is no text, such as EOS


def _encoded(stops: Sequence[str]) -> list[bytes]:
    try:
        encoded = [stop.encode() for stop in stops]
    except UnicodeEncodeError as error:
        raise ConfigError(f"a stop string must be text that has a UTF-8 form, but: {error}") from error
    if not all(encoded):
        raise ConfigError("a stop string must not be empty: every text would end before it began; leave it out")
    return encoded


def _first(text: bytes, stops: Sequence[bytes]) -> int | None:
    """Where the stop string begins that is complete first."""
    found = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _held_back(text: bytes, stops: Sequence[bytes]) -> int:
    """Length of the longest end of the text that a stop string may begin with."""
    lengths = (length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
    return max(lengths, default=0)


class Ending:
    """Says after which token a stop string is complete. Keeps as many bytes as the longest one has, less one.

    Args:
        bytes_of: the bytes of a token.
        stops: stop strings; without any a row never ends here.

    Raises:
        ConfigError: a stop string is empty, or has no UTF-8 form (a lone surrogate).

    Attributes:
        complete: whether one was found.

    >>> ending = Ending({1: b"so ", 2: b"lo", 3: b"ng"}.get, ["long"])
    >>> ending.after([1, 2]), ending.after([3, 1])
    (None, 1)
    """

    def __init__(self, bytes_of: BytesOf, stops: Sequence[str]) -> None:
        self._bytes_of, self._stops = bytes_of, _encoded(stops)
        self._kept = max(map(len, self._stops), default=1) - 1
        self._tail = b""
        self.complete = False

    def after(self, tokens: Iterable[int]) -> int | None:
        """How many of these newly emitted tokens there are when a stop string is complete, or None.

        What follows that token was never emitted; nothing is to be told behind it.
        """
        for number, token in enumerate(tokens, start=1):
            text = self._tail + (self._bytes_of(token) or b"")
            if _first(text, self._stops) is not None:
                self.complete = True
                return number
            self._tail = text[max(0, len(text) - self._kept) :]
        return None


class StoppedText:
    """The text of emitted tokens as a client sees it, up to the first stop string.

    All that it gives, joined, is the text of all tokens in front of that stop string, however they come in blocks.

    Args:
        bytes_of: the bytes of a token, as for `Ending`.
        stops: stop strings; without any only half characters are kept back.

    Raises:
        ConfigError: a stop string is empty, or has no UTF-8 form (a lone surrogate).

    Attributes:
        stopped: whether a stop string was found: nothing more is shown.

    >>> text = StoppedText({1: b"so ", 2: b"lo", 3: b"ng"}.get, ["long"])
    >>> [text.push([1, 2]), text.push([2]), text.push([3, 1]), text.close()]
    ['so ', 'lo', '', '']
    """

    def __init__(self, bytes_of: BytesOf, stops: Sequence[str] = ()) -> None:
        self._bytes_of, self._stops = bytes_of, _encoded(stops)
        self._characters: TextStream[bytes] = TextStream(lambda certain: certain)
        self._held = b""
        self.stopped = False

    def push(self, tokens: Iterable[int]) -> str:
        """The characters that are certain now: no half ones, and none that may belong to a stop string."""
        if self.stopped:
            return ""
        text = self._held + b"".join(self._bytes_of(token) or b"" for token in tokens)
        begin = _first(text, self._stops)
        self.stopped = begin is not None
        certain = len(text) - _held_back(text, self._stops) if begin is None else begin
        self._held = text[certain:]
        return self._characters.push([text[:certain]]) + (self._characters.close() if self.stopped else "")

    def close(self) -> str:
        """Behind the last token: what was kept back, if no stop string was found. Half a character is U+FFFD."""
        if self.stopped:
            return ""
        return self._characters.push([self._held]) + self._characters.close()
