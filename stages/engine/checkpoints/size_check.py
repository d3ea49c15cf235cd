"""Refuse a checkpoint whose configuration needs far more than its files hold, or that does not fit into memory.

Building takes time and memory by the configuration alone: a million layers, or a vocabulary of a billion tokens, keep
a process busy for hours or use up its memory, however small the files are.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from stages.engine.checkpoints.gguf_file import find_gguf, read_gguf
from stages.engine.checkpoints.gguf_model import has_family
from stages.engine.checkpoints.mapped_checkpoint import MAPPED_FROM
from stages.engine.quantisation.stored import NUMBER_TYPES
from store.errors import ModelError

HEADER_BYTES = 100 << 20  # of a safetensors file; its own library allows as many
# More layers than these must be among the tensors one by one. Experts may be rows of one tensor, or named by the
# configuration of a model that has none, so more of them are built without a question.
FEW_MODULES, FEW_EXPERTS = 1000, 100_000
# Weights of one bit are 8 to a byte; twice as many are allowed for those that a file holds once and a model twice.
WEIGHTS_PER_BYTE = 16
PACKED = 1.1  # memory of files that are packed as they are while they are loaded, in their size
# Folder of the memory's control group in both versions, its limit, and what it uses.
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_REPEATED = ("layer", "layers", "blocks", "experts")  # how keys end that count modules, such as n_layer


def require_plausible_sizes(source: str, config: Mapping[str, Any], build: Callable[[], Any]) -> None:
    """Compare what a configuration needs with the safetensors files next to it; without any, do nothing. `build` builds
    the model by it, on torch's meta device, where tensors take no memory. Raises `ModelError` if there are more layers
    or experts than tensors, or far more weights than the files can hold.
    """
    config_file = find_file(source, "config.json")
    tensors, size = measure_files(config_file.parent if config_file else Path(source))
    if not size:
        return
    for name, count in _count_modules(config):
        if count > max(FEW_EXPERTS if name.endswith("experts") else FEW_MODULES, tensors):
            raise ModelError(
                f"{source!r} must have a tensor for each of its modules, but its configuration has {name} = {count:,} "
                f"and its files hold {tensors:,} tensors; fetch the model again"
            )
    try:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in build().parameters())
    except Exception:  # the loader explains what is wrong
        return
    if weights > WEIGHTS_PER_BYTE * size:
        raise ModelError(
            f"{source!r} must have files that hold its weights, but its configuration needs {weights:,} weights "
            f"({weights * 4 / 2**30:,.0f} GiB in float32) and its files have {size:,} bytes; fetch the model again"
        )


def measure_files(folder: Path) -> tuple[int, int]:
    """Return the number of tensors and of bytes in the safetensors files of a folder; files that are none count 0."""
    headers = list(_read_headers(folder))
    return sum(len(tensors) for tensors, _ in headers), sum(size for _, size in headers)


def _read_headers(folder: Path) -> Iterator[tuple[list[tuple[int, int, str]], int]]:
    """Yield the numbers, bytes and types of the tensors of each safetensors file of a folder, and its size in bytes."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length <= HEADER_BYTES else {}
            entries = [header[name] for name in header.keys() - {"__metadata__"}]
            spans = [(prod(entry["shape"]), entry["dtype"], *entry["data_offsets"]) for entry in entries]
            yield [(numbers, end - begin, kind) for numbers, kind, begin, end in spans], path.stat().st_size
        except (OSError, ValueError, AttributeError, RecursionError, KeyError, TypeError):
            continue


def require_memory(needs: Mapping[str, int], root: Path = Path("/")) -> None:
    """Refuse models that do not fit into memory together, given the bytes that each takes by its name. Raises
    `ModelError` if they take more than the system or the control group of this process has left.
    """
    needed, available = sum(needs.values()), min(_list_available(root), default=inf)
    if needed > available:
        raise ModelError(
            f"{max(needs, key=lambda name: needs[name])!r} must fit into memory, but about {needed / 1e9:.1f} GB are "
            f"needed and {available / 1e9:.1f} GB are available; take a file of fewer bits, such as a GGUF file in "
            "Q4_K_M, or a smaller model, or end other programs"
        )


def estimate_memory(source: str, dtype: str, *, trained: bool = False, mapped: Collection[str] = ()) -> int:
    """Return about how many bytes of memory a model takes at the most while it is loaded on a CPU; 0 if none of its
    files are here.

    The codes of a GGUF file are packed as they are, and so are numbers of 16 bits, in folders those of models of the
    types `mapped`. Other weights are numbers of modules first, and packed then. `dtype` is the name of the modules'
    type in torch, or `auto`. Of models that are `trained` below the output layer, all become numbers of modules.
    """
    if path := find_gguf(source):
        read = read_gguf(path)
        tensors = [(prod(tensor.shape), len(tensor.data)) for tensor in read.tensors.values()]
        coded, fits = any(tensor.float_type is None for tensor in read.tensors.values()), has_family(read)
        stays = coded if dtype == "auto" else any(tensor.name != "F32" for tensor in read.tensors.values())
    else:
        config, coded = find_file(source, "config.json"), False
        headers = [one for file, _ in (_read_headers(config.parent) if config else ()) for one in file]
        tensors = [(numbers, size) for numbers, size, _ in headers]
        large, kinds = sum(size for _, size, _ in headers) >= MAPPED_FROM, {kind for _, _, kind in headers}
        stays, fits = large and dtype == "float32" and {"F32"} != kinds <= {*NUMBER_TYPES, "F32"}, False
        with suppress(OSError, ValueError, AttributeError):  # which the loader explains
            fits = config is not None and json.loads(config.read_text(encoding="utf-8")).get("model_type") in mapped
    if stays and fits and not trained and dtype in ("auto", "float32"):
        return int(PACKED * sum(size for _, size in tensors))
    itemsize = {"float32": 4, "auto": 4 if coded else 0}.get(dtype, 2)
    return sum(numbers * itemsize + size if itemsize else 2 * size for numbers, size in tensors)


def _list_available(root: Path) -> Iterator[int]:
    """Yield the bytes of memory that the system has left, and the control group that this process is confined to."""
    if kibibytes := _read_figures(root / "proc/meminfo").get("MemAvailable:"):
        yield 1024 * kibibytes
    for folder, limit, usage in _GROUPS:
        most, used = (sum(_read_figures(root / folder / name).values()) for name in (limit, usage))
        if most:
            cached = _read_figures(root / folder / "memory.stat")  # of files: dropped where others need memory
            yield max(0, most - used + cached.get("inactive_file", 0) + cached.get("active_file", 0))


def _read_figures(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line, or a number alone."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {words[0]: int(number) for words in lines if words and (number := words[:2][-1]).isdecimal()}


def _count_modules(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the numbers of repeated modules in a configuration and its parts, by key."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _count_modules(value)
        elif isinstance(value, int) and name.endswith(_REPEATED):
            yield name, value


def find_file(source: str, name: str) -> Path | None:
    """Return the path of a file in a folder, where it need not be, or of a cached file of a hub model."""
    if Path(source).is_dir():
        return Path(source) / name
    try:
        cached = try_to_load_from_cache(source, name)
    except ValueError:  # no name of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None
