"""Encode training examples as flat arrays of numbers, without their labels.

Integers of an example: offset, judged, copied, pieces, positions of n-grams, soft targets, a 0; every list is preceded
by its length. Soft targets have a header, their sizes and their arrays; an example without them has a 0. States come
last: their shape and their bytes, four to an integer.

Floats: the probabilities of the soft targets.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from stages.contract.blocks import Numbers, TopTokens, TrainingExample

Coded = tuple[Numbers, Numbers]  # integers, floats
Part = Sequence[float] | Numbers
HEADER = (1, -1)  # of soft targets: their number, and their kind, of which there is one
NO_MORE = (0,)  # further texts with soft targets: there are none


class IndexEntry(NamedTuple):
    """The target of an example, whether it has states, and its scope."""

    target: str
    states: bool = False
    scope: int = 0


# A cache: an example is immutable and remains in the buffers for many snapshots.
_coded: "WeakKeyDictionary[TrainingExample, Coded]" = WeakKeyDictionary()


def _encode(example: TrainingExample) -> Coded:
    found = _coded.get(example)
    if found is None:
        integers: list[Part] = [(example.offset, example.judged, example.copied)]
        floats: list[Part] = []
        _append_list(integers, example.pieces)
        _append_list(integers, example.ngram_positions)
        _append_soft_targets(integers, floats, example.soft_targets)
        integers.append(NO_MORE)
        if example.states is not None:
            # Their bytes as integers, the last one filled up with zeros.
            of_states = np.frombuffer(example.states.tobytes() + bytes(-example.states.size % 4), np.int32)
            integers += (example.states.shape, of_states)
        found = _join(integers, np.int32), _join(floats, np.float32)
        _coded[example] = found
    return found


def _join(parts: Sequence[Part], kind: type[np.generic]) -> Numbers:
    return np.concatenate([np.zeros(0, kind), *(np.asarray(part, kind).ravel() for part in parts)])


def _append_list(integers: list[Part], numbers: Sequence[int]) -> None:
    integers += ((len(numbers),), numbers)


def _append_soft_targets(integers: list[Part], floats: list[Part], one: TopTokens | None) -> None:
    if one is None:
        integers.append((0,))
        return
    integers += ((*HEADER, *one.probs.shape, len(one.pieces)), one.positions, one.levels, one.own)
    integers += (one.lengths, one.pieces)
    floats.append(one.probs)


class ExampleWriter:
    """Concatenates encoded examples."""

    def __init__(self) -> None:
        self.index: list[IndexEntry] = []  # one entry per example
        self._integers: list[Numbers] = []
        self._floats: list[Numbers] = []

    def add(self, example: TrainingExample) -> None:
        integers, floats = _encode(example)
        self.index.append(IndexEntry(example.target, example.states is not None, example.scope))
        self._integers.append(integers)
        self._floats.append(floats)

    @property
    def integers(self) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *self._integers]))

    @property
    def floats(self) -> Tensor:
        """The floats of all examples, concatenated, as bytes."""
        return torch.from_numpy(np.frombuffer(b"".join(floats.tobytes() for floats in self._floats), np.uint8).copy())


class ExampleReader:
    """Decodes examples in the order in which they were added."""

    def __init__(self, integers: Tensor, floats: Tensor) -> None:
        self._integers, self._next = integers.numpy(), 0
        self._bytes, self._place = floats.numpy().tobytes(), 0

    @property
    def at_end(self) -> bool:
        return self._next == len(self._integers)

    def read(self, entry: IndexEntry) -> TrainingExample:
        """Decode the next example, given its entry of the index."""
        target, has_states, scope = entry
        offset, judged, copied = self._integer(), self._integer(), self._integer()
        pieces, ngram_positions = self._list(), self._list()
        soft_targets = self._soft_targets() if self._integer() else None
        self._take(len(NO_MORE))
        states = None
        if has_states:
            tokens, size = self._integer(), self._integer()
            numbers = self._take((tokens * size + 3) // 4).astype(np.int32)
            states = np.frombuffer(numbers.tobytes(), np.int8, tokens * size).reshape(tokens, size)
        return TrainingExample(offset, target, pieces, soft_targets, (), ngram_positions, judged, states, scope, copied)

    def _take(self, count: int) -> Numbers:
        self._next += count
        return self._integers[self._next - count : self._next].copy()

    def _integer(self) -> int:
        return int(self._take(1)[0])

    def _list(self) -> tuple[int, ...]:
        return tuple(self._take(self._integer()).tolist())

    def _soft_targets(self) -> TopTokens:
        """Read soft targets, of whose header the first number is read."""
        _, tokens, kept, pieces = self._take(4).tolist()
        probs = np.frombuffer(self._bytes, np.float32, tokens * kept, self._place).reshape(tokens, kept).copy()
        self._place += probs.nbytes
        positions, levels, own = (self._take(tokens) for _ in range(3))
        lengths = self._take(tokens * kept).reshape(tokens, kept)
        return TopTokens(positions, levels, own, probs, lengths, self._take(pieces))
