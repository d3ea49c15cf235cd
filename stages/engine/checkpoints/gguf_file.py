"""Reads GGUF files: metadata, and tensors under the names of `llama.cpp`; finds the file that a name means.

A file has a header with keys and values (shape, tokenizer, chat template) and the tensors, most of them quantised.
"""

import mmap
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
import torch
from torch import Tensor

from stages.engine.quantisation.layouts import FILE_KINDS
from stages.engine.quantisation.stored import NUMBER_TYPES, StoredMatrix
from store.errors import ModelError

_MAGIC = b"GGUF"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a text
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# By general.type, general.architecture, or how a key begins: files that belong to a model.
_PROJECTOR = "is the projector of a model of images or sound; name the file of its language model"
_OTHER_PURPOSES = {
    "adapter": "is an adapter (LoRA) of another; merge it with llama-export-lora and name the merged file",
    "imatrix": "is an importance matrix, with which a model is quantised; name the file of the model",
    "mmproj": _PROJECTOR,
    "clip": _PROJECTOR,
    "eagle3": "is a draft head, which runs on the hidden states of its target alone; name a whole model",
}
ORIGIN = "gguf"  # folder in a converted model's folder, with the file that it was made from


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor of a file lies."""

    shape: tuple[int, ...]  # in the order of torch
    kind: int  # number of its type in GGUF
    data: memoryview  # its bytes

    @property
    def name(self) -> str:
        """The name of its type, such as Q4_K."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.kind).name

    @property
    def float_type(self) -> torch.dtype | None:
        """The type of plain numbers; None for quantised ones."""
        return _FLOATS.get(self.kind)

    def dequantise(self) -> Tensor:
        """Return the values; quantised ones in float32."""
        if self.kind in _FLOATS:
            return torch.frombuffer(bytearray(self.data), dtype=_FLOATS[self.kind]).reshape(self.shape)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(self._rows, GGMLQuantizationType(self.kind))).reshape(self.shape)

    def map_matrix(self, order_O: Tensor | None) -> StoredMatrix | None:
        """Return a matrix as it is stored, unread; None for what is none, and for numbers of 32 bits. `order_O` says
        which row is which output; None: they are in the same order.
        """
        if self.name not in (*FILE_KINDS, *NUMBER_TYPES) or len(self.shape) != 2:
            return None
        return StoredMatrix(self.name, self.shape[1], self._rows, order_O)

    @property
    def _rows(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.data, dtype=np.uint8).reshape(*self.shape[:-1], -1)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, all parts of it if it was divided."""

    path: Path  # of the first part
    metadata: Mapping[str, Any]  # its keys and values
    tensors: Mapping[str, StoredTensor]  # by name

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def field(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)


class _Header:
    """Reads the values of a header one after another."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.position = data, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Return consecutive texts. A vocabulary and its merges are hundreds of thousands."""
        data, position, read, found = self.data, self.position, _LENGTH.unpack_from, []
        for _ in range(count):
            (length,) = read(data, position)
            start, position = position + _LENGTH.size, position + _LENGTH.size + length
            found.append(str(data[start:position], "utf-8", "replace"))
        self.position = position
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.numbers("IQ")
            if kind in _NUMBERS:
                return list(self.numbers(f"{count}{_NUMBERS[kind]}"))
            if kind == _STRING:
                return self.texts(count)
            return [self.value(kind) for _ in range(count)]
        return self.numbers(_NUMBERS[kind])[0]


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata of a file and of the parts that follow it; tensors are read when they are dequantised. Raises
    `ModelError` for what is no GGUF file or is cut off, for missing parts, and for a file that holds neither a language
    model nor its vocabulary.

    The last files that were read are kept until `forget_headers`: a vocabulary takes a tenth of a second, and 40 MB.
    """
    with suppress(OSError):  # which is explained below
        status = path.stat()
        return _read_parts(path, status.st_ino, status.st_size, status.st_mtime_ns)
    return _read_parts(path)


@lru_cache(maxsize=2)
def _read_parts(path: Path, *_: int) -> GgufFile:
    metadata, tensors = _read_part(path)
    parts = metadata.get("split.count", 1)
    numbered = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if parts > 1 and not numbered:
        raise ModelError(
            f"{path} must be the first of {parts} parts; name the file that ends in -00001-of-{parts:05}.gguf"
        )
    for number in range(2, parts + 1):
        assert numbered
        part = path.with_name(f"{numbered[1]}-{number:05}-of-{numbered[2]}.gguf")
        if not part.is_file():
            raise ModelError(f"{path} must have all of its {parts} parts, but {part.name} is missing; fetch it")
        tensors.update(_read_part(part)[1])
    other = _find_other_purpose(metadata)
    if other:
        raise ModelError(f"{path} must be a language model, but {other}")
    return GgufFile(path, metadata, tensors)


forget_headers = _read_parts.cache_clear  # of files that were read


def _find_other_purpose(metadata: Mapping[str, Any]) -> str | None:
    """Return what a file is if it is no model that continues texts, and what to do; None if it is one."""
    architecture = metadata.get("general.architecture")
    names = {metadata.get("general.type"), architecture, *(key.partition(".")[0] for key in metadata)}
    known = [purpose for name, purpose in _OTHER_PURPOSES.items() if name in names]
    if known:
        return known[0]
    if architecture is None:
        return "does not state general.architecture; convert the model again, or name another file"
    pooled = metadata.get(f"{architecture}.pooling_type", 0)
    if pooled or not metadata.get(f"{architecture}.attention.causal", True):
        return (
            f"is one of the architecture {architecture} for embeddings or for diffusion; name one that continues texts"
        )
    return None


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} must be a GGUF file, but cannot be read ({error}); fetch it again") from error
    if bytes(data[:4]) != _MAGIC:
        raise ModelError(f"{path} must be a GGUF file, but does not begin with 'GGUF'; name another file")
    try:
        return _parse(path, data)
    except (struct.error, IndexError, KeyError, MemoryError, OverflowError, ValueError) as error:
        raise ModelError(
            f"{path} must be a whole GGUF file of version 2 or 3, but is cut off or damaged ({error}; it has "
            f"{len(data):,} bytes); fetch it again"
        ) from error


def _parse(path: Path, data: memoryview) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    header = _Header(data)
    version, tensors, keys = header.numbers("4xIQQ")
    if version and not version & 0xFFFF:
        raise ModelError(f"{path} must be little-endian, but is big-endian; gguf-convert-endian {path} little")
    if version not in (2, 3):
        raise ModelError(f"{path} must be a GGUF file of version 2 or 3, but is of {version}; convert the model again")
    metadata = {header.text(): header.value(header.numbers("I")[0]) for _ in range(keys)}
    table = []
    for _ in range(tensors):
        name, (dimensions,) = header.text(), header.numbers("I")
        shape = header.numbers(f"{dimensions}Q")[::-1]
        table.append((name, shape, *header.numbers("IQ")))
    alignment = metadata.get("general.alignment", 32)
    start, stored = -(-header.position // alignment) * alignment, {}
    for name, shape, kind, offset in table:
        if kind not in GGML_QUANT_SIZES:
            raise ModelError(
                f"{path} must hold tensors in types that the installed package gguf knows, but {name} is in number "
                f"{kind}; pip install --upgrade gguf, or take a file of the same model in Q4_K_M"
            )
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        length = torch.Size(shape).numel() // block * size
        if start + offset + length > len(data):
            raise ValueError(f"the tensor {name} ends at byte {start + offset + length:,}")
        stored[name] = StoredTensor(shape, kind, data[start + offset : start + offset + length])
    return metadata, stored


def find_gguf(source: str) -> Path | None:
    """Return the GGUF file that a name means; None if it means something else.

    A name is a file, a folder with one GGUF file and no `config.json`, `FOLDER:FILE`, `FOLDER:QUANTISATION`, or
    `OWNER/NAME:QUANTISATION` on the hub. Raises `ModelError` if there is no such file, or several.
    """
    path, (folder, _, which) = Path(source), source.rpartition(":")
    if path.is_dir():
        return None if (path / "config.json").exists() else _find_in_folder(path, source)
    if folder and which and Path(folder).is_dir() and not path.is_file():
        return _choose(_files_in(Path(folder)), which, folder)
    if path.is_file() or (path.suffix == ".gguf" and ":" not in path.name):
        if not path.is_file():
            raise ModelError(f"{path} must be a GGUF file, but there is no such file; name another")
        if path.suffix == ".gguf" or path.open("rb").read(4) == _MAGIC:
            return path
        raise ModelError(f"{path} must be a folder with a model or a GGUF file, but is another file; name its folder")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", folder) and which:
        return _find_on_hub(folder, which)
    return None


def _find_in_folder(folder: Path, source: str) -> Path | None:
    models, others = _files_in(folder), sorted(folder.glob("*.gguf"))
    if others and not models and not (folder / "adapter_config.json").exists():
        raise ModelError(f"{source} must have a GGUF file of a model, but has {others[0].name} alone; fetch the model")
    return _choose(models, "", source) if models else None


def find_origin(source: str) -> Path | None:
    """Return the GGUF file that a folder was converted from: the only one in its own folder `gguf`."""
    files = _files_in(Path(source) / ORIGIN) if Path(source).is_dir() else []
    return files[0] if len(files) == 1 else None


def _files_in(folder: Path) -> list[Path]:
    """Return the GGUF files of a folder that are models, and of a divided one the first part."""
    files = sorted(path for path in folder.glob("*.gguf") if _may_be_model(path.name))
    return [path for path in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", path.name)]


def _may_be_model(name: str) -> bool:
    """Tell a model's file by its name from projectors and importance matrices, which are published next to it."""
    return not re.search("mmproj|imatrix", name)


def _matches(name: str, which: str) -> bool:
    """Check whether a file's name, or the quantisation at its end, is the one that is wanted."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", name.lower().removesuffix(".gguf"))
    wanted = which.lower().removesuffix(".gguf")
    return stem == wanted or bool(re.search(rf"[.-]{re.escape(wanted)}$", stem))


def _choose(files: list[Path], which: str, folder: str) -> Path:
    matching = [path for path in files if not which or _matches(path.name, which)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(path.name for path in files[:8]) or "none"
    raise ModelError(
        f"{folder} must have one GGUF file{f' of {which!r}' if which else ''}, but has {len(matching)} of: {names}; "
        f"name one: {folder}:{files[0].name if files else 'FILE.gguf'}"
    )


def require_hub() -> None:
    """Fail at once with `OSError` where the hub's own client would retry for half a minute."""
    from huggingface_hub.constants import ENDPOINT

    if not getproxies():
        socket.create_connection((urlsplit(ENDPOINT).hostname, 443), timeout=5).close()


def _find_on_hub(repository: str, which: str) -> Path:
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.file_download import repo_folder_name

    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model") / "snapshots"
    local = [path for folder in sorted(cached.glob("*")) for path in _files_in(folder) if _matches(path.name, which)]
    try:
        if local:
            return local[-1]
        require_hub()
        names = [Path(name) for name in HfApi().list_repo_files(repository) if name.endswith(".gguf")]
        chosen = _choose([name for name in names if _may_be_model(name.name)], which, repository)
        parts = [name for name in names if name.name.split("-0000")[0] == chosen.name.split("-0000")[0]]
        return next(
            path for part in parts if (path := Path(hf_hub_download(repository, str(part)))).name == chosen.name
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{repository}:{which} must be on the hub or in its cache, but is not ({reason}); name a .gguf file"
        ) from error
