"""Models of safetensors whose matrices of 16 bits stay in their files, as those of a GGUF file do."""

import json
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stages.engine.checkpoints.gguf_model import place_weights
from stages.engine.quantisation.stored import NUMBER_TYPES, StoredMatrix

MAPPED_FROM = 128 << 20  # bytes of a folder's files; smaller models are read at once, and may then be changed


@dataclass(frozen=True)
class _Tensor:
    kind: str  # name of its type in safetensors
    shape: tuple[int, ...]
    data: memoryview

    def read(self) -> Tensor:
        """Return a copy in float32."""
        kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[self.kind]
        return torch.frombuffer(bytearray(self.data), dtype=kind).reshape(self.shape).float()

    def map(self) -> StoredMatrix:
        rows_OX = np.frombuffer(self.data, np.uint8).reshape(self.shape[0], -1)
        return StoredMatrix(self.kind, self.shape[1], rows_OX)


def map_checkpoint(folder: Path, make: Callable[[], Any], fits: Callable[[Any], bool]) -> Any | None:
    """Make the model of a folder in float32, with its matrices of 16 bits in the files. `make` makes it without
    weights, and `fits` tells whether it can be used so. None if it cannot, if its files are small, and if they hold
    anything but the model's tensors, which the loader of `transformers` understands or explains.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if sum(path.stat().st_size for path in files) < MAPPED_FROM:
        return None
    with torch.device("meta"):
        model = make()
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    tensors = {name: tensor for path in files for name, tensor in _map_file(path)}
    kinds = {tensor.kind for tensor in tensors.values()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != expected or not kinds <= {*NUMBER_TYPES, "F32"} or kinds == {"F32"} or not fits(model):
        return None
    mapped, weights = dict[str, StoredMatrix](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        if part == "weight" and tensor.kind in NUMBER_TYPES and len(tensor.shape) == 2:
            is_matrix = isinstance(model.get_submodule(path), nn.Linear | nn.Embedding)
            if is_matrix:
                mapped[path] = tensor.map()
                continue
        weights[name] = tensor.read()
    return place_weights(model, folder, mapped, weights)


def _map_file(path: Path) -> Iterator[tuple[str, _Tensor]]:
    """Yield the names and tensors of a file. Raises `ValueError` for one that is cut off."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    for name in header.keys() - {"__metadata__"}:
        begin, end = (start + offset for offset in header[name]["data_offsets"])
        if end > len(data):
            raise ValueError(f"{path.name} is cut off")
        yield name, _Tensor(header[name]["dtype"], tuple(header[name]["shape"]), data[begin:end])
