"""Snapshots: the state of the stages between two blocks, as JSON values and tensors, from which a run can resume.

Every object with a state has `save(writer)`, which returns the state as a frozen dataclass, and
`restore(saved, reader)`, which is called on a new object with the same configuration: `reader.decode(TheState, saved)`
decodes the dataclass. Only the owner of a state reads it; to all others it is `Saved`. Tensors, rows and examples are
stored separately and referenced by number in the state, each once, so that an object that several stages share is one
object after restoring. Nothing is pickled.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class CounterState:
...     count: int
...     recent: tuple[float, ...] = ()
>>> files = SnapshotWriter().files(CounterState(3, (0.5,)))
>>> reader = SnapshotReader(files)
>>> reader.state
{'count': 3, 'recent': [0.5]}
>>> reader.decode(CounterState, reader.state)
CounterState(count=3, recent=(0.5,))
>>> reader.decode(CounterState, {"count": "three"})
Traceback (most recent call last):
store.errors.CorruptError: a checkpoint must hold a CounterState, but its 'count' is not one: ...

    state.json            the state, the rows, the index of the examples
    tensors.safetensors   tensors, and the examples' numbers in two flat arrays
    weights.safetensors   tensors that hardly ever change: a snapshot whose weights equal those of the one before does
                          not write them again

A snapshot is taken on the decoding thread: it copies mutable values. It is encoded later, on the log's thread.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from stages.contract.blocks import SequenceState, TrainingExample
from stages.contract.example_codec import ExampleReader, ExampleWriter, IndexEntry
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import RandomSourceState, SeededRandomSource
from store.errors import CorruptError

STATE, TENSORS, WEIGHTS = "state.json", "tensors.safetensors", "weights.safetensors"
FORMAT = 3  # incremented when runs of older releases cannot be resumed

Json = Any  # a value that JSON can represent
Saved = object  # the return value of `save`, or the same as decoded from JSON; only its owner reads it
Moments = Mapping[str, Mapping[str, int]]  # per parameter of an optimizer the numbers of its tensors, by name
RandomState = tuple[int, tuple[int, ...], float | None]  # as `random.Random.getstate` returns it

StateT = TypeVar("StateT")


_ATTRIBUTES = {"room": "remaining_tokens", "draws": "rng"}  # of a `SequenceState`, by their names in a checkpoint


@dataclass(frozen=True)
class RowState:
    """A `SequenceState` as it is saved. Rows of older releases lack some of the fields with defaults."""

    offset: int
    prompt_id: str
    dataset: str
    text: str
    tokens: list[int]
    prompt_length: int
    pieces: list[int]
    draws: RandomSourceState
    room: int
    block: int
    finish: str
    sampling: SamplingParams | None = None
    scope: int = 0
    target_state: list[int] | None = None
    predicted: int = 0
    record_example: bool = True

    @classmethod
    def from_sequence(cls, row: SequenceState) -> "RowState":
        """Copy a sequence, including its mutable values."""
        assert isinstance(row.rng, SeededRandomSource)
        copied = {field.name: getattr(row, _ATTRIBUTES.get(field.name, field.name)) for field in fields(cls)}
        state = None if row.target_state is None else row.target_state.tolist()
        mutable = {"tokens": [*row.tokens], "pieces": [*row.pieces], "draws": row.rng.save(), "target_state": state}
        return cls(**{**copied, **mutable})

    def to_sequence(self) -> SequenceState:
        """Make the sequence, which continues with its own random numbers."""
        values = {_ATTRIBUTES.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        state = None if self.target_state is None else torch.tensor(self.target_state, dtype=torch.int8)
        return SequenceState(**{**values, "rng": SeededRandomSource.from_state(self.draws), "target_state": state})


@dataclass(frozen=True)
class _Contents:
    """The contents of `state.json`."""

    format: int
    state: Saved
    rows: list[RowState]
    lessons: list[IndexEntry]
    shared: list[Saved]


@cache
def _decoder(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _to_json_value(state: object) -> dict[str, object]:
    """Convert a dataclass for JSON; named tuples are encoded as arrays."""
    if not is_dataclass(state) or isinstance(state, type):
        raise TypeError(f"a state must be made of dataclasses and what JSON can hold, got {type(state).__name__}")
    return {field.name: getattr(state, field.name) for field in fields(state)}


class SnapshotWriter:
    """Takes one snapshot.

    Args:
        rows: whether rows in flight are included. Without them every stage is saved as if none were admitted.
        weights_before: the weights of the last snapshot.
    """

    def __init__(self, *, rows: bool = True, weights_before: Sequence[Tensor] = ()) -> None:
        self._keeps_rows = rows
        self._tensors: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._weights_before = weights_before
        self._rows: dict[SequenceState, int] = {}
        self._row_states: list[RowState] = []
        self._examples: dict[TrainingExample, int] = {}
        self._shared: dict[int, int] = {}
        self._shared_states: list[Saved] = []

    def tensor(self, tensor: Tensor) -> int:
        """Add a copy of a tensor. Returns its number."""
        self._tensors.append(tensor.detach().to("cpu", copy=True).contiguous())
        return len(self._tensors) - 1

    def weight(self, weight: Tensor) -> int:
        """Add a copy of a tensor that hardly ever changes. Returns its number, which is negative."""
        place, current = len(self._weights), weight.detach().to("cpu").contiguous()
        before = self._weights_before[place] if place < len(self._weights_before) else None
        same = before is not None and before.dtype == current.dtype and torch.equal(before, current)
        self._weights.append(before if before is not None and same else current.clone())
        return -len(self._weights)

    @property
    def weights(self) -> Sequence[Tensor]:
        """The weights so far, for the next snapshot."""
        return tuple(self._weights)

    @property
    def kept_files(self) -> frozenset[str]:
        """Names of files that are the same as in the last snapshot, and which `files` leaves out."""
        both = zip(self._weights, self._weights_before, strict=False)
        same = len(self._weights) == len(self._weights_before) and all(now is before for now, before in both)
        return frozenset([WEIGHTS] if self._weights and same else [])

    def includes(self, row: SequenceState) -> bool:
        """Return whether a row in flight is part of the snapshot; stages omit the others. Private rows never are."""
        return self._keeps_rows and not row.private

    def row(self, row: SequenceState) -> int:
        """Add a row in flight. Returns its number.

        Raises:
            ValueError: the row is not included, or it has stop strings or other wishes of a request, which ends with
                the process that answers it.
        """
        if not self.includes(row) or row.belongs_to_request:
            raise ValueError(
                f"a row in a snapshot must be kept and have no wishes of a request, got {row.prompt_id}; "
                "leave out rows in flight: SnapshotWriter(rows=False)"
            )
        if row not in self._rows:
            self._rows[row] = len(self._rows)
            self._row_states.append(RowState.from_sequence(row))
        return self._rows[row]

    def example(self, example: TrainingExample) -> int:
        """Add an example without its labels. Returns its number."""
        return self._examples.setdefault(example, len(self._examples))

    def save_shared(self, owner: object, save: Callable[[], Saved]) -> int:
        """Save the state of an object that several stages share, once. Returns its number."""
        if id(owner) not in self._shared:
            number = self._shared[id(owner)] = len(self._shared_states)
            self._shared_states.append(None)
            self._shared_states[number] = save()
        return self._shared[id(owner)]

    def files(self, state: Saved) -> dict[str, bytes]:
        """Encode the files of the snapshot, without those that are kept. May be called on another thread: its contents
        are immutable."""
        written = ExampleWriter()
        for example in self._examples:
            written.add(example)
        tensors = {f"{number}": tensor for number, tensor in enumerate(self._tensors)}
        tensors |= {"lessons.integers": written.integers, "lessons.floats": written.floats}
        contents = _Contents(FORMAT, state, self._row_states, written.index, self._shared_states)
        encoded = {
            STATE: json.dumps(contents, separators=(",", ":"), default=_to_json_value).encode(),
            TENSORS: save(tensors),
        }
        if self._weights and WEIGHTS not in self.kept_files:
            encoded[WEIGHTS] = save({f"{-number}": weight for number, weight in enumerate(self._weights, start=1)})
        return encoded


class SnapshotReader:
    """Reads the files of a `SnapshotWriter`.

    Raises:
        CorruptError: the files are of another format or cannot be read.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            value, self._tensors = json.loads(files[STATE]), load(files[TENSORS])
            if WEIGHTS in files:  # older releases kept all tensors in one file
                self._tensors |= load(files[WEIGHTS])
        except Exception as error:
            raise CorruptError(f"a checkpoint must hold a readable {STATE} and {TENSORS}, but: {error}") from error
        if value.get("format") != FORMAT:
            raise CorruptError(
                f"a checkpoint must have format {FORMAT}, got {value.get('format')}; use the release that wrote it"
            )
        contents = self.decode(_Contents, value)
        self.state: Json = contents.state  # the state that the snapshot was made of
        self._rows = [row.to_sequence() for row in contents.rows]
        examples = ExampleReader(self._tensors["lessons.integers"], self._tensors["lessons.floats"])
        self._examples = [examples.read(entry) for entry in contents.lessons]
        self._shared, self._restored = contents.shared, set[int]()

    def decode(self, kind: type[StateT], saved: Saved) -> StateT:
        """Decode and validate a state.

        Raises:
            CorruptError: the saved value is not of this type.
        """
        try:
            decoded: StateT = _decoder(kind).validate_python(saved)  # type: ignore[arg-type]  # classes are hashable
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise CorruptError(
                f"a checkpoint must hold a {kind.__name__}, but its '{place}' is not one: {first['msg']}"
            ) from error
        return decoded

    def tensor(self, number: int) -> Tensor:
        """Return a tensor by its number, on the CPU; the caller owns it."""
        return self._tensors[str(number)]

    def row(self, number: int) -> SequenceState:
        """Return a row in flight; the same object for the same number."""
        return self._rows[number]

    def example(self, number: int) -> TrainingExample:
        """Return an example without labels; the same object for the same number."""
        return self._examples[number]

    def restore_shared(self, number: int, restore: Callable[[Saved], None]) -> None:
        """Restore an object that several stages share, at the first call for its number."""
        if number not in self._restored:
            self._restored.add(number)
            restore(self._shared[number])


def save_moments(state: Mapping[str, Any], keep: Callable[[Tensor], int]) -> Moments:
    """Save the moments of an `Optimizer.state_dict()`: per parameter its tensors by name, without learning rates.

    `keep`: `SnapshotWriter.tensor`, or `SnapshotWriter.weight` if updates are rare.
    """
    return {
        str(parameter): {name: keep(value) for name, value in moments.items()}
        for parameter, moments in state["state"].items()
    }


def restore_moments(saved: Moments, optimizer: torch.optim.Optimizer, reader: SnapshotReader) -> dict[str, Any]:
    """Read the moments as a state for `optimizer.load_state_dict`."""
    moments = {
        int(parameter): {name: reader.tensor(number) for name, number in tensors.items()}
        for parameter, tensors in saved.items()
    }
    return {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}
