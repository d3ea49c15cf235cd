"""Snapshots: what the stages hold between two blocks, as plain values, so that a run can go on from there.

Everything with a state has `save(keep)`, which returns a JSON value, and `restore(saved, kept)`, which is called on a
new object made from the same configuration and gives it that state. Tensors, rows and lessons are kept apart and named
by number in the value, each once, so that what was one object to several stages is one again. Nothing is pickled.

    state.json            the value, the rows, where each lesson begins
    tensors.safetensors   tensors, and the lessons' numbers in two flat arrays

A snapshot is taken on the thread that decodes: it copies what may change. It is encoded later, on the log's thread.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from stages.blocks import Lesson, Row
from stages.distributions import Sampling
from stages.draws import SeededDraws
from stages.lesson_codec import LessonReader, LessonWriter
from store.errors import CorruptError

STATE, TENSORS = "state.json", "tensors.safetensors"
FORMAT = 2  # goes up when a run of an older release cannot be gone on with

Json = Any  # what JSON can hold


class SnapshotWriter:
    """Takes one snapshot.

    Args:
        rows: whether rows in flight are kept. Without them every stage is saved as if none were admitted.
    """

    def __init__(self, *, rows: bool = True) -> None:
        self._keeps_rows = rows
        self._tensors: list[Tensor] = []
        self._rows: dict[Row, int] = {}
        self._row_values: list[Json] = []
        self._lessons: dict[Lesson, int] = {}
        self._shared: dict[int, int] = {}
        self._shared_values: list[Json] = []

    def tensor(self, tensor: Tensor) -> int:
        """Keep a copy."""
        self._tensors.append(tensor.detach().to("cpu", copy=True).contiguous())
        return len(self._tensors) - 1

    def keeps(self, row: Row) -> bool:
        """Whether a row in flight is to be kept; who holds rows leaves out the others. A private row never is."""
        return self._keeps_rows and not row.private

    def row(self, row: Row) -> int:
        """Keep a row in flight.

        Raises:
            ValueError: it is not to be kept, or it has stop strings: they belong to a request, which does not outlive
                the process that answers it.
        """
        if not self.keeps(row) or row.ending is not None:
            raise ValueError(
                f"a row in a snapshot must be one that is to be kept, without stop strings, got {row.prompt_id}; "
                "leave out rows in flight: SnapshotWriter(rows=False)"
            )
        if row not in self._rows:
            self._rows[row] = len(self._rows)
            self._row_values.append(_row_value(row))
        return self._rows[row]

    def lesson(self, lesson: Lesson) -> int:
        """Keep a lesson, but for its labels."""
        return self._lessons.setdefault(lesson, len(self._lessons))

    def once(self, owner: object, value: Callable[[], Json]) -> int:
        """The state of something that several hold: saved with the first of them."""
        if id(owner) not in self._shared:
            self._shared[id(owner)] = len(self._shared_values)
            self._shared_values.append(None)
            self._shared_values[self._shared[id(owner)]] = value()
        return self._shared[id(owner)]

    def files(self, state: Json) -> dict[str, bytes]:
        """The files of the snapshot. May be called on another thread: nothing of what it reads changes any more."""
        written = LessonWriter()
        for lesson in self._lessons:
            written.add(lesson)
        tensors = {f"{number}": tensor for number, tensor in enumerate(self._tensors)}
        tensors |= {"lessons.integers": written.integers, "lessons.floats": written.floats}
        value = {
            "format": FORMAT,
            "state": state,
            "rows": self._row_values,
            "lessons": written.index,
            "shared": self._shared_values,
        }
        return {STATE: json.dumps(value, separators=(",", ":")).encode(), TENSORS: save(tensors)}


class SnapshotReader:
    """Gives back what a `SnapshotWriter` kept.

    Attributes:
        state: the value that the snapshot was made of.

    Raises:
        CorruptError: the files are of another format or cannot be read.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            value, self._tensors = json.loads(files[STATE]), load(files[TENSORS])
        except Exception as error:
            raise CorruptError(f"a checkpoint must hold a readable {STATE} and {TENSORS}, but: {error}") from error
        if value.get("format") != FORMAT:
            raise CorruptError(
                f"a checkpoint must have format {FORMAT}, got {value.get('format')}; use the release that wrote it"
            )
        self.state: Json = value["state"]
        self._rows = [_row_of(row) for row in value["rows"]]
        lessons = LessonReader(self._tensors["lessons.integers"], self._tensors["lessons.floats"])
        self._lessons = [lessons.read(target) for target in value["lessons"]]
        self._shared, self._restored = value["shared"], set[int]()

    def tensor(self, number: int) -> Tensor:
        """A kept tensor, on the CPU; who asks owns it."""
        return self._tensors[str(number)]

    def row(self, number: int) -> Row:
        """A row in flight; the same object for the same number."""
        return self._rows[number]

    def lesson(self, number: int) -> Lesson:
        """A lesson without labels; the same object for the same number."""
        return self._lessons[number]

    def once(self, number: int, restore: Callable[[Json], None]) -> None:
        """Restore what several hold: the first time it is asked for."""
        if number not in self._restored:
            self._restored.add(number)
            restore(self._shared[number])


def _row_value(row: Row) -> Json:
    assert isinstance(row.draws, SeededDraws)
    return {
        "offset": row.offset,
        "prompt_id": row.prompt_id,
        "dataset": row.dataset,
        "text": row.text,
        "tokens": list(row.tokens),
        "prompt_length": row.prompt_length,
        "pieces": list(row.pieces),
        "draws": row.draws.save(),
        "room": row.room,
        "block": row.block,
        "finish": row.finish,
        "sampling": row.sampling and asdict(row.sampling),
        "logprobs": row.logprobs,
    }


def _row_of(value: Json) -> Row:
    sampling = value.get("sampling")  # rows of older releases have none
    own = {"draws": SeededDraws.restored(value["draws"]), "sampling": sampling and Sampling(**sampling)}
    return Row(**{**value, **own})


def save_moments(state: Mapping[str, Any], keep: SnapshotWriter) -> Json:
    """The moments of what `Optimizer.state_dict` returned, per parameter its tensors by name, without rates."""
    return {
        str(parameter): {name: keep.tensor(value) for name, value in moments.items()}
        for parameter, moments in state["state"].items()
    }


def restored_moments(saved: Json, optimizer: torch.optim.Optimizer, kept: SnapshotReader) -> dict[str, Any]:
    """A state for `optimizer.load_state_dict`."""
    moments = {
        int(parameter): {name: kept.tensor(value) for name, value in of_parameter.items()}
        for parameter, of_parameter in saved.items()
    }
    return {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}


def random_state(saved: Json) -> tuple[Any, ...]:
    """What `random.Random.setstate` takes, of a `getstate` that went through JSON."""
    version, numbers, gauss = saved
    return version, tuple(numbers), gauss
