"""Text of emitted tokens as it comes: only whole characters, though tokens may end inside one."""

import codecs
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Token = TypeVar("Token")


class TextStream(Generic[Token]):
    """Turns tokens into text one push at a time. All that it gives, joined, is `Vocabulary.decode` of all tokens.

    Args:
        bytes_of: the bytes that a token stands for; None for a token that is no text, such as EOS.

    >>> euro = TextStream({7: b" \\xe2\\x82", 8: b"\\xac"}.get)
    >>> [euro.push([7]), euro.push([8]), euro.push([7]), euro.close()]
    [' ', '€', ' ', '\N{REPLACEMENT CHARACTER}']
    """

    def __init__(self, bytes_of: Callable[[Token], bytes | None]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Iterable[Token]) -> str:
        """The characters that these tokens complete.

        The beginning of a character is kept back until the rest of it comes. Bytes that can no longer become a
        character are U+FFFD at once.
        """
        return self._decoder.decode(b"".join(self._bytes_of(token) or b"" for token in tokens))

    def close(self) -> str:
        """What was kept back, as U+FFFD. The next push begins a new text."""
        left = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return left
