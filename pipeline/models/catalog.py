"""The built-in models: what they are and where they lie.

Two drafters and two targets with four different vocabularies, all small Llamas. They are shipped in
`pipeline/models/` as bfloat16 safetensors; `python -m benchmarks.model_building` makes them again from text
(`benchmarks/model_building/`). `drafter-1.6m` was trained on text alone, for the built-in targets; `drafter-4m` is
distilled from SmolLM2-135M-Instruct's answers, for chat models.
"""

from dataclasses import dataclass
from pathlib import Path

from store.errors import ModelError

MODELS_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ZooModel:
    """One built-in model."""

    name: str  # how `builtin:NAME` calls it
    role: str  # `drafter` or `target`
    vocabulary_size: int  # tokens, special ones included
    shape: dict[str, int]  # layers, width and so on, in `LlamaConfig`'s words
    parameters: int = 0  # number of weights


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
        ZooModel("drafter-1.6m", "drafter", 4096, _llama(layers=2, width=192, heads=6, mlp=512), 1_598_400),
        ZooModel("drafter-4m", "drafter", 8192, _llama(layers=3, width=256, heads=4, mlp=768), 4_458_240),
        ZooModel("target-7m", "target", 6144, _llama(layers=6, width=288, heads=6, mlp=768), 7_247_520),
        ZooModel("target-12m", "target", 8192, _llama(layers=8, width=320, heads=8, mlp=864), 11_720_000),
    )
}


def find(name: str) -> ZooModel:
    """The built-in model of a name.

    Raises:
        ModelError: for an unknown name.
    """
    if name not in ZOO:
        raise ModelError(f"there is no built-in model {name!r}; there are {', '.join(ZOO)}")
    return ZOO[name]


def path_of(name: str) -> Path:
    """The folder of a built-in model.

    Raises:
        ModelError: for an unknown name, or when the model has not been built.
    """
    folder = MODELS_FOLDER / find(name).name
    if not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"the built-in model {name} is not at {folder}; make it with: python -m benchmarks.model_building {name}"
        )
    return folder
