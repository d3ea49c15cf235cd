"""Lessons as flat arrays of numbers, without their labels.

Integers of a lesson: offset, judged, pieces, positions of n-grams, teachings, branches; every list after its length.
Floats: of each teaching in turn the groups, the direct parts and the rest. They are kept in float64 where float32 would
not be exact: most teaching is computed in float32, that of deeper levels is not.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.blocks import Branch, Lesson, Teaching

Coded = tuple[npt.NDArray[np.int32], npt.NDArray[np.floating[Any]]]

# A lesson never changes and stays in the buffers for many snapshots.
_coded: "WeakKeyDictionary[Lesson, Coded]" = WeakKeyDictionary()


def _encoded(lesson: Lesson) -> Coded:
    found = _coded.get(lesson)
    if found is None:
        integers: list[int] = [lesson.offset, lesson.judged]
        floats: list[float] = []
        _put(integers, lesson.pieces)
        _put(integers, lesson.ngram_positions)
        _put_teachings(integers, floats, lesson.teachings)
        integers.append(len(lesson.branches))
        for branch in lesson.branches:
            integers.append(branch.start)
            _put(integers, branch.pieces)
            _put_teachings(integers, floats, branch.teachings)
        found = _coded[lesson] = np.array(integers, np.int32), _narrow(np.array(floats, np.float64))
    return found


def _narrow(floats: npt.NDArray[np.float64]) -> npt.NDArray[np.floating[Any]]:
    narrow = floats.astype(np.float32)
    return narrow if np.array_equal(narrow, floats) else floats


def _put(integers: list[int], numbers: Sequence[int]) -> None:
    integers.append(len(numbers))
    integers.extend(numbers)


def _put_teachings(integers: list[int], floats: list[float], teachings: Sequence[Teaching]) -> None:
    integers.append(len(teachings))
    for teaching in teachings:
        integers += (teaching.position, teaching.depth)
        _put(integers, teaching.ids)
        floats += (*teaching.group, *teaching.direct, teaching.rest)


class LessonWriter:
    """Joins lessons.

    Attributes:
        index: per lesson its target, and whether its floats are double.
    """

    def __init__(self) -> None:
        self.index: list[tuple[str, bool]] = []
        self._integers: list[npt.NDArray[np.int32]] = []
        self._floats: list[npt.NDArray[np.floating[Any]]] = []

    def add(self, lesson: Lesson) -> None:
        """Behind those before it."""
        integers, floats = _encoded(lesson)
        self.index.append((lesson.target, floats.dtype == np.float64))
        self._integers.append(integers)
        self._floats.append(floats)

    @property
    def integers(self) -> Tensor:
        """Of all lessons, joined."""
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *self._integers]))

    @property
    def floats(self) -> Tensor:
        """Of all lessons, joined, as bytes."""
        return torch.from_numpy(np.frombuffer(b"".join(floats.tobytes() for floats in self._floats), np.uint8).copy())


class LessonReader:
    """Takes lessons apart again, in the order in which they were added."""

    def __init__(self, integers: Tensor, floats: Tensor) -> None:
        self._integers: Iterator[int] = iter(integers.tolist())
        self._bytes, self._place, self._double = floats.numpy().tobytes(), 0, False

    def read(self, indexed: Sequence[Any]) -> Lesson:
        """The next lesson, by its entry of the index."""
        target, self._double = indexed
        offset, judged = next(self._integers), next(self._integers)
        pieces, ngram_positions, teachings = self._list(), self._list(), self._teachings()
        branches = tuple(
            Branch(next(self._integers), self._list(), self._teachings()) for _ in range(next(self._integers))
        )
        return Lesson(offset, target, pieces, teachings, (), ngram_positions, judged, branches)

    def _list(self) -> tuple[int, ...]:
        return tuple(next(self._integers) for _ in range(next(self._integers)))

    def _numbers(self, count: int) -> tuple[float, ...]:
        kind = np.dtype(np.float64 if self._double else np.float32)
        found = np.frombuffer(self._bytes, kind, count, self._place)
        self._place += count * kind.itemsize
        return tuple(found.tolist())

    def _teachings(self) -> tuple[Teaching, ...]:
        return tuple(self._teaching() for _ in range(next(self._integers)))

    def _teaching(self) -> Teaching:
        position, depth, ids = next(self._integers), next(self._integers), self._list()
        return Teaching(position, depth, ids, self._numbers(len(ids)), self._numbers(len(ids)), self._numbers(1)[0])
