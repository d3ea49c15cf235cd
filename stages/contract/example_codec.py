"""Encode training examples as flat arrays of numbers, without their labels.

Integers of an example: offset, judged, pieces, positions of n-grams, soft targets, branches; every list is preceded by
its length. Floats: for each soft target the groups, the direct parts and the rest. They are stored in float64 where
float32 is not exact: most soft targets are computed in float32, those of deeper levels in float64.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.contract.blocks import OffPolicySpan, SoftTarget, TrainingExample

Coded = tuple[npt.NDArray[np.int32], npt.NDArray[np.floating[Any]]]


class IndexEntry(NamedTuple):
    """The target of an example, and whether its floats are stored in float64."""

    target: str
    double: bool


# A cache: an example is immutable and remains in the buffers for many snapshots.
_coded: "WeakKeyDictionary[TrainingExample, Coded]" = WeakKeyDictionary()


def _encode(example: TrainingExample) -> Coded:
    found = _coded.get(example)
    if found is None:
        integers: list[int] = [example.offset, example.judged]
        floats: list[float] = []
        _append_list(integers, example.pieces)
        _append_list(integers, example.ngram_positions)
        _append_soft_targets(integers, floats, example.soft_targets)
        integers.append(len(example.branches))
        for branch in example.branches:
            integers.append(branch.start)
            _append_list(integers, branch.pieces)
            _append_soft_targets(integers, floats, branch.soft_targets)
        found = _coded[example] = np.array(integers, np.int32), _narrow(np.array(floats, np.float64))
    return found


def _narrow(floats: npt.NDArray[np.float64]) -> npt.NDArray[np.floating[Any]]:
    narrow = floats.astype(np.float32)
    return narrow if np.array_equal(narrow, floats) else floats


def _append_list(integers: list[int], numbers: Sequence[int]) -> None:
    integers.append(len(numbers))
    integers.extend(numbers)


def _append_soft_targets(integers: list[int], floats: list[float], soft_targets: Sequence[SoftTarget]) -> None:
    integers.append(len(soft_targets))
    for soft_target in soft_targets:
        integers += (soft_target.position, soft_target.depth)
        _append_list(integers, soft_target.ids)
        floats += (*soft_target.group, *soft_target.direct, soft_target.rest)


class ExampleWriter:
    """Concatenates encoded examples.

    Attributes:
        index: one entry per example.
    """

    def __init__(self) -> None:
        self.index: list[IndexEntry] = []
        self._integers: list[npt.NDArray[np.int32]] = []
        self._floats: list[npt.NDArray[np.floating[Any]]] = []

    def add(self, example: TrainingExample) -> None:
        """Append an example to the arrays."""
        integers, floats = _encode(example)
        self.index.append(IndexEntry(example.target, floats.dtype == np.float64))
        self._integers.append(integers)
        self._floats.append(floats)

    @property
    def integers(self) -> Tensor:
        """The integers of all examples, concatenated."""
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *self._integers]))

    @property
    def floats(self) -> Tensor:
        """The floats of all examples, concatenated, as bytes."""
        return torch.from_numpy(np.frombuffer(b"".join(floats.tobytes() for floats in self._floats), np.uint8).copy())


class ExampleReader:
    """Decodes examples in the order in which they were added."""

    def __init__(self, integers: Tensor, floats: Tensor) -> None:
        self._integers: Iterator[int] = iter(integers.tolist())
        self._bytes, self._place, self._double = floats.numpy().tobytes(), 0, False

    def read(self, entry: tuple[str, bool]) -> TrainingExample:
        """Decode the next example, given its entry of the index."""
        target, self._double = entry
        offset, judged = next(self._integers), next(self._integers)
        pieces, ngram_positions, soft_targets = self._list(), self._list(), self._soft_targets()
        branches = tuple(
            OffPolicySpan(next(self._integers), self._list(), self._soft_targets()) for _ in range(next(self._integers))
        )
        return TrainingExample(offset, target, pieces, soft_targets, (), ngram_positions, judged, branches)

    def _list(self) -> tuple[int, ...]:
        return tuple(next(self._integers) for _ in range(next(self._integers)))

    def _numbers(self, count: int) -> tuple[float, ...]:
        kind = np.dtype(np.float64 if self._double else np.float32)
        found = np.frombuffer(self._bytes, kind, count, self._place)
        self._place += count * kind.itemsize
        return tuple(found.tolist())

    def _soft_targets(self) -> tuple[SoftTarget, ...]:
        return tuple(self._soft_target() for _ in range(next(self._integers)))

    def _soft_target(self) -> SoftTarget:
        position, depth, ids = next(self._integers), next(self._integers), self._list()
        return SoftTarget(position, depth, ids, self._numbers(len(ids)), self._numbers(len(ids)), self._numbers(1)[0])
