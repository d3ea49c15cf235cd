"""The texts of the rows in flight as lines of one array, for compiled functions.

Shapes: L lines, T tokens of the longest text.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class RowTexts:
    """Lines of tokens, which grow.

    >>> texts = RowTexts()
    >>> line = texts.take_line()
    >>> texts.extend(line, 0, [5, 6])
    >>> texts.extend(line, 2, [5, 6, 7])
    >>> texts.tokens[line, :3].tolist()
    [5, 6, 7]
    """

    def __init__(self) -> None:
        self.tokens: npt.NDArray[np.int32] = np.zeros((0, 0), np.int32)  # (L, T)
        self._free: list[int] = []

    def take_line(self) -> int:
        """Return a line that nobody has."""
        if not self._free:
            lines = len(self.tokens)
            self._reserve(max(1, 2 * lines), self.tokens.shape[1])
            self._free = list(range(len(self.tokens) - 1, lines - 1, -1))
        return self._free.pop()

    def free_line(self, line: int) -> None:
        """Give a line back."""
        self._free.append(line)

    def extend(self, line: int, known: int, tokens: Sequence[int]) -> None:
        """Copy the tokens of a text after the first `known` ones, which the line has."""
        if len(tokens) > self.tokens.shape[1]:
            self._reserve(len(self.tokens), 2 * len(tokens))
        self.tokens[line, known : len(tokens)] = tokens[known:]

    def _reserve(self, lines: int, length: int) -> None:
        larger = np.zeros((lines, length), np.int32)
        larger[: self.tokens.shape[0], : self.tokens.shape[1]] = self.tokens
        self.tokens = larger
