"""Doubles that the tests share: a language model with known distributions, and rows to feed it."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from stages.contract.blocks import SequenceState
from stages.engine.models.language_model import LanguageModel
from stages.sampling.random_source import RandomSource, SeededRandomSource


class TableModel:
    """`LanguageModel` with logits that are a function of all tokens read. It keeps what it was fed, and nothing else.

    Args:
        logits: of the next token, given all tokens so far (V,).
        vocabulary_size: V.
        hidden_size: width of the hidden state, which depends on all tokens too.
    """

    max_length = 1 << 30
    device = torch.device("cpu")
    reads_trees = True
    weight_changes = 0

    def __init__(self, logits: Callable[[tuple[int, ...]], Tensor], vocabulary_size: int, hidden_size: int = 4) -> None:
        self.vocabulary_size, self.hidden_size = vocabulary_size, hidden_size
        self._logits = logits
        self._order: list[SequenceState] = []
        self._read: dict[SequenceState, list[int]] = {}
        self._ids = set(range(vocabulary_size))

    def admit(self, row: SequenceState, tokens: Sequence[int], *, read: bool = True) -> None:
        self._order.append(row)
        self._read[row] = list(tokens[:-1]) if read else []

    def extend(self, row: SequenceState, tokens: Sequence[int]) -> None:
        self._read[row].extend(tokens)

    def release(self, row: SequenceState) -> None:
        place = self._order.index(row)
        self._order[place] = self._order[-1]
        self._order.pop()
        del self._read[row]

    def length(self, row: SequenceState) -> int:
        return len(self._read[row])

    def roll_back(self, row: SequenceState, length: int) -> None:
        del self._read[row][length:]

    def keep_path(self, row: SequenceState, start: int, path: Sequence[int]) -> None:
        read = self._read[row]
        assert list(path) == sorted(set(path)), "each new token follows one before it"
        assert set(path) <= set(range(len(read) - start)), "only new tokens can be kept"
        self._read[row] = [*read[:start], *(read[start + token] for token in path)]

    def tokens_read(self, row: SequenceState) -> list[int]:
        """The tokens of a row that are cached."""
        return list(self._read[row])

    def restrict(self, ids: Collection[int]) -> None:
        self._ids = set(ids)

    def mask_without(self, allowed: Collection[int]) -> Tensor:
        return torch.tensor([number not in allowed for number in range(self.vocabulary_size)])

    def forward(
        self,
        rows: Sequence[SequenceState],
        tokens: Sequence[Sequence[int]],
        wanted: Sequence[int],
        *,
        hidden: bool = False,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert list(rows) == self._order, "all admitted rows, in order, a released row's place taken by the last"
        histories: list[tuple[int, ...]] = []
        for number, (row, new, count) in enumerate(zip(rows, tokens, wanted, strict=True)):
            assert count <= len(new), "no more positions can be wanted than the row has new tokens"
            cached = tuple(self._read[row])
            self._read[row] += new
            follows = range(-1, len(new) - 1) if parents is None else parents[number]
            histories += [(*cached, *path) for path in _paths(new, follows)][len(new) - count :]
        logits_NV = torch.stack([self._logits(history) for history in histories]).double()
        logits_NV[:, [number not in self._ids for number in range(self.vocabulary_size)]] = -torch.inf
        if not hidden:
            return logits_NV, logits_NV
        return logits_NV, torch.stack([_hidden_state(history, self.hidden_size) for history in histories])


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Per new token the new tokens from the cached ones to itself, given the index of the one that each follows."""
    paths: list[tuple[int, ...]] = []
    for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert -1 <= parent < index, "a new token follows an earlier one, or the cached ones"
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def _hidden_state(history: tuple[int, ...], width: int) -> Tensor:
    angle = sum((place + 1) * (token + 1) for place, token in enumerate(history[-8:]))
    return torch.sin(torch.arange(1, width + 1) * float(angle))


def row_of(
    tokens: Sequence[int],
    pieces: Sequence[int] | None = None,
    *,
    offset: int = 0,
    remaining_tokens: int = 99,
    rng: RandomSource | None = None,
) -> SequenceState:
    """A row whose prompt is these tokens; its pieces are the same numbers unless given."""
    return SequenceState(
        offset,
        f"prompt:{offset}",
        "tests",
        "",
        list(tokens),
        len(tokens),
        list(tokens if pieces is None else pieces),
        rng or SeededRandomSource(7, offset),
        remaining_tokens,
    )


def read_in_steps(model: LanguageModel, text: list[int], step: int = 1) -> Tensor:
    """The logits of a text that is read in steps (T, V)."""
    row = row_of(text[:1], remaining_tokens=len(text))
    model.admit(row, row.tokens)
    parts = [text[begin : begin + step] for begin in range(0, len(text), step)]
    logits_TV = torch.cat([model.forward([row], [part], [len(part)])[0] for part in parts])
    model.release(row)
    return logits_TV
