"""Stand-ins that the tests share: a language model with known laws, and rows to feed it."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from stages.blocks import Row
from stages.draws import Draws, SeededDraws


class TableModel:
    """`LanguageModel` with logits that are a function of all tokens read. It keeps what it was fed, and nothing else.

    Places of the output that mean nothing hold NaN, so that whoever uses one is found out.

    Args:
        logits: of the next token, given all tokens so far (V,).
        vocabulary_size: V.
        hidden_size: width of the hidden state, which depends on all tokens too.
    """

    max_length = 1 << 30
    device = torch.device("cpu")

    def __init__(self, logits: Callable[[tuple[int, ...]], Tensor], vocabulary_size: int, hidden_size: int = 4) -> None:
        self.vocabulary_size, self.hidden_size = vocabulary_size, hidden_size
        self._logits = logits
        self._order: list[Row] = []
        self._read: dict[Row, list[int]] = {}

    def admit(self, row: Row, tokens: Sequence[int]) -> None:
        self._order.append(row)
        self._read[row] = list(tokens[:-1])

    def release(self, row: Row) -> None:
        place = self._order.index(row)
        self._order[place] = self._order[-1]
        self._order.pop()
        del self._read[row]

    def length(self, row: Row) -> int:
        return len(self._read[row])

    def roll_back(self, row: Row, length: int) -> None:
        del self._read[row][length:]

    def mask_without(self, allowed: Collection[int]) -> Tensor:
        return torch.tensor([number not in allowed for number in range(self.vocabulary_size)])

    def forward(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], keep: int, *, hidden: bool = False
    ) -> tuple[Tensor, Tensor]:
        assert list(rows) == self._order, "all admitted rows, in order, a released row's place taken by the last"
        assert 1 <= keep <= max(map(len, tokens)), "no more positions can be wanted than the longest row has"
        logits_BQV = torch.full((len(rows), keep, self.vocabulary_size), torch.nan, dtype=torch.float64)
        hidden_BQW = torch.full((len(rows), keep, self.hidden_size), torch.nan)
        for number, (row, new) in enumerate(zip(rows, tokens, strict=True)):
            self._read[row] += new
            for back in range(1, min(keep, len(new)) + 1):
                history = tuple(self._read[row][: len(self._read[row]) - back + 1])
                logits_BQV[number, -back] = self._logits(history)
                hidden_BQW[number, -back] = _hidden(history, self.hidden_size)
        return logits_BQV, hidden_BQW if hidden else logits_BQV


def _hidden(history: tuple[int, ...], width: int) -> Tensor:
    angle = sum((place + 1) * (token + 1) for place, token in enumerate(history[-8:]))
    return torch.sin(torch.arange(1, width + 1) * float(angle))


def row_of(
    tokens: Sequence[int],
    pieces: Sequence[int] | None = None,
    *,
    offset: int = 0,
    room: int = 99,
    draws: Draws | None = None,
) -> Row:
    """A row whose prompt is these tokens; its pieces are the same numbers unless given."""
    return Row(
        offset,
        f"prompt:{offset}",
        "tests",
        "",
        list(tokens),
        len(tokens),
        list(tokens if pieces is None else pieces),
        draws or SeededDraws(7, offset),
        room,
    )
