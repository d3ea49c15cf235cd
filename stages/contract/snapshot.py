"""Snapshots: the state of the stages between two blocks, as JSON values and tensors, from which a run can resume.

Every object with a state has `state_dict()` and `load_state_dict(state)`, as in torch: the second is called on a new
object with the same configuration. A state is a tree of dicts with text as keys, lists, and what JSON can hold; its
leaves may also be tensors, sequences in flight, training examples, and objects with a `state_dict()` that several
owners share. Only the owner of a state reads it. A leaf that several owners hold is stored once and is one object after
loading; of a shared object, that is its state. Nothing is pickled.

>>> state = {"count": 3, "recent": (0.5,), "sums": torch.ones(2)}
>>> read_snapshot(Snapshot(state).files())
{'count': 3, 'recent': [0.5], 'sums': tensor([1., 1.])}

    state.json            the state, the rows, the index of the examples
    tensors.safetensors   tensors, and the examples' numbers in two flat arrays
    weights.safetensors   tensors that hardly ever change: a snapshot whose weights equal those of the one before does
                          not write them again

A snapshot is taken on the decoding thread: it copies mutable values. It is encoded later, on the log's thread.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from stages.contract.blocks import SequenceState, TrainingExample
from stages.contract.example_codec import ExampleReader, ExampleWriter, IndexEntry
from stages.sampling.noise import Noise
from stages.sampling.params import SamplingParams
from stages.sampling.random_source import SeededRandomSource
from store.errors import CorruptError

STATE, TENSORS, WEIGHTS = "state.json", "tensors.safetensors", "weights.safetensors"
FORMAT = 1  # incremented when runs of earlier releases cannot be resumed

State = Any  # a tree as described above; only its owner reads it
SCALARS = frozenset([type(None), bool, int, float, str])
LEAF = "$"  # the only key of a dict that stands for a leaf; its value is the kind and the number

# Fields of a `SequenceState` that are saved as they are. The others belong to a request, or are found again.
ROW_FIELDS = (
    *("offset", "prompt_id", "dataset", "text", "tokens", "prompt_length", "pieces", "remaining_tokens", "block"),
    *("finish", "scope", "predicted", "record_example"),
)


@dataclass(frozen=True)
class RarelyChanged:
    """A part of a state whose tensors hardly ever change: they go to a file that is written only when they did."""

    state: State


class Snapshot:
    """A copy of a state, to be encoded later. Raises `ValueError` if it contains a private row, or one with stop
    strings or other wishes of a request, which ends with the process that answers it, and `TypeError` if it contains a
    value that cannot be stored.
    """

    def __init__(self, state: State, weights_before: Sequence[Tensor] = ()) -> None:
        self._weights_before = weights_before
        self._tensors: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._rows: list[State] = []
        self._shared: list[State] = []
        self._numbers: dict[int, State] = {}  # of leaves, by identity
        self._examples: list[TrainingExample] = []
        self._kept: list[object] = []  # keeps identities from being used again
        self._state = self._copy(state, self._add_tensor)

    @property
    def weights(self) -> Sequence[Tensor]:
        """The tensors that hardly ever change, for the next snapshot."""
        return tuple(self._weights)

    @property
    def kept_files(self) -> frozenset[str]:
        """Names of files that are the same as in the last snapshot, and which `files` leaves out."""
        both = zip(self._weights, self._weights_before, strict=False)
        same = len(self._weights) == len(self._weights_before) and all(now is before for now, before in both)
        return frozenset([WEIGHTS] if self._weights and same else [])

    def files(self) -> dict[str, bytes]:
        """Encode the files of the snapshot, without those that are kept. May be called on another thread: its contents
        are immutable.
        """
        written = ExampleWriter()
        for example in self._examples:
            written.add(example)
        tensors = {f"{number}": tensor for number, tensor in enumerate(self._tensors)}
        tensors |= {"examples.integers": written.integers, "examples.floats": written.floats}
        value = {"format": FORMAT, "state": self._state, "rows": self._rows, "shared": self._shared}
        value["examples"] = written.index
        encoded = {STATE: json.dumps(value, separators=(",", ":")).encode(), TENSORS: save(tensors)}
        if self._weights and WEIGHTS not in self.kept_files:
            encoded[WEIGHTS] = save({f"{number}": weight for number, weight in enumerate(self._weights)})
        return encoded

    def _copy(self, value: State, add_tensor: Callable[[Tensor], State]) -> State:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value) or LEAF in value:
                raise TypeError(f"the keys of a state must be text other than {LEAF!r}, got {list(value)[:3]}")
            return {key: self._copy(one, add_tensor) for key, one in value.items()}
        if isinstance(value, Sequence):
            if SCALARS.issuperset(map(type, value)):  # most are: a third of the time of all
                return list(value)
            return [self._copy(one, add_tensor) for one in value]
        if isinstance(value, RarelyChanged):
            return self._copy(value.state, self._add_weight)
        if id(value) not in self._numbers:
            self._kept.append(value)
            self._numbers[id(value)] = self._add_leaf(value, add_tensor)
        return self._numbers[id(value)]

    def _add_leaf(self, value: object, add_tensor: Callable[[Tensor], State]) -> State:
        if isinstance(value, Tensor):
            return add_tensor(value)
        if isinstance(value, SequenceState):
            self._rows.append(self._copy(_save_row(value), add_tensor))
            return {LEAF: ["row", len(self._rows) - 1]}
        if isinstance(value, TrainingExample):
            self._examples.append(value)
            return {LEAF: ["example", len(self._examples) - 1]}
        if hasattr(value, "state_dict"):
            self._shared.append(self._copy(value.state_dict(), add_tensor))
            return {LEAF: ["shared", len(self._shared) - 1]}
        if is_dataclass(value):
            return self._copy({field.name: getattr(value, field.name) for field in fields(value)}, add_tensor)
        raise TypeError(f"a state must be made of what JSON can hold, tensors, rows and examples, got {type(value)}")

    def _add_tensor(self, tensor: Tensor) -> State:
        self._tensors.append(tensor.detach().to("cpu", copy=True).contiguous())
        return {LEAF: ["tensor", len(self._tensors) - 1]}

    def _add_weight(self, weight: Tensor) -> State:
        place, current = len(self._weights), weight.detach().to("cpu").contiguous()
        before = self._weights_before[place] if place < len(self._weights_before) else None
        same = before is not None and before.dtype == current.dtype and torch.equal(before, current)
        self._weights.append(before if before is not None and same else current.clone())
        return {LEAF: ["weight", place]}


def read_snapshot(files: Mapping[str, bytes]) -> State:
    """Read the files of a `Snapshot`. Returns its state; a leaf is the same object wherever it is. Raises
    `CorruptError` if the files are of another format or cannot be read.
    """
    try:
        value, tensors = json.loads(files[STATE]), load(files[TENSORS])
        weights = load(files[WEIGHTS]) if WEIGHTS in files else {}
        read = _decode(value, tensors, weights) if value["format"] == FORMAT else None
    except Exception as error:
        raise CorruptError(f"a checkpoint must hold a readable {STATE} and {TENSORS}, but: {error}") from error
    if value["format"] != FORMAT:
        raise CorruptError(
            f"a checkpoint must have format {FORMAT}, got {value['format']}; use the release that wrote it"
        )
    return read


def load_state(owner: Any, state: State) -> None:
    """Let an object continue from its state. Raises `CorruptError` if the state is not one of such an object."""
    try:
        owner.load_state_dict(state)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptError(
            f"a checkpoint must hold the state of a {type(owner).__name__} of this release, but: {error!r}"
        ) from error


def _decode(value: State, tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> State:
    leaves: dict[str, Mapping[str, object]] = {"tensor": tensors, "weight": weights}
    reader = ExampleReader(tensors["examples.integers"], tensors["examples.floats"])
    leaves["example"] = {str(number): reader.read(IndexEntry(*one)) for number, one in enumerate(value["examples"])}
    leaves["row"] = {str(number): _load_row(_resolve(one, leaves)) for number, one in enumerate(value["rows"])}
    shared: dict[str, object] = {}
    leaves["shared"] = shared
    for number, one in enumerate(value["shared"]):  # those that it contains come before it
        shared[str(number)] = _resolve(one, leaves)
    return _resolve(value["state"], leaves)


def _resolve(value: State, leaves: Mapping[str, Mapping[str, object]]) -> State:
    if isinstance(value, dict):
        if LEAF in value:
            kind, number = value[LEAF]
            return leaves[kind][str(number)]
        return {key: _resolve(one, leaves) for key, one in value.items()}
    return [_resolve(one, leaves) for one in value] if isinstance(value, list) else value


def _save_row(row: SequenceState) -> State:
    if row.private or row.belongs_to_request:
        raise ValueError(
            f"a row in a snapshot must be neither private nor have wishes of a request, got {row.prompt_id}; "
            "leave it out of the rows whose state is saved"
        )
    assert isinstance(row.rng, SeededRandomSource)
    state = {name: getattr(row, name) for name in ROW_FIELDS}
    noise = None if row.noise is None else row.noise.key
    return state | {"rng": row.rng.state, "noise": noise, "sampling": row.sampling, "target_state": row.target_state}


def _load_row(state: State) -> SequenceState:
    rng, key, sampling = SeededRandomSource(*state["rng"]), state["noise"], None
    if (saved := state["sampling"]) is not None:
        values: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in saved.items()}
        sampling = SamplingParams(**values)
    noise = None if key is None else Noise(key)
    return SequenceState(**{**state, "rng": rng, "noise": noise, "sampling": sampling})


def moments_of(optimizer: torch.optim.Optimizer | Mapping[str, Any]) -> State:
    """Return the moments of an optimizer, or of its `state_dict()`, without its learning rates."""
    state = optimizer if isinstance(optimizer, Mapping) else optimizer.state_dict()
    return {str(parameter): dict(moments) for parameter, moments in state["state"].items()}


def with_moments(optimizer: torch.optim.Optimizer, moments: State) -> dict[str, Any]:
    """Return saved moments as a state for `optimizer.load_state_dict`."""
    state = {int(parameter): dict(tensors) for parameter, tensors in moments.items()}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def random_state(state: State) -> tuple[Any, ...]:
    """Return what `random.Random.getstate` returned, for `setstate`."""
    version, numbers, gauss = state
    return (version, tuple(numbers), gauss)
