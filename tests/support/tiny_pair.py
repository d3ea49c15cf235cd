"""A pair and a trio of tiny models with different vocabularies, trained for a moment on one family of sentences."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from filelock import FileLock
from safetensors.torch import load_file, save_file

from benchmarks.model_building import recipes
from benchmarks.model_building.pretrain import Recipe
from benchmarks.model_building.recipes import ModelRecipe

NAMES = ("Ann", "Tom", "Ida", "Carlos")
THINGS = ("apples", "pencils", "stones", "blue marbles", "Brötchen")


def sentences(begin: int, end: int) -> list[str]:
    """Sums in words; the numbers of the range decide everything."""
    return [
        f"{NAMES[n % 4]} has {n} {THINGS[n % 5]} and finds {n % 7} more. In the end {NAMES[n % 4]} has {n + n % 7} "
        f"{THINGS[n % 5]}, and gives {n % 3} of the {THINGS[n % 5]} to {NAMES[(n + 1) % 4]}."
        for n in range(begin, end)
    ]


def shape(layers: int, width: int) -> dict[str, int]:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 2 * width, **heads}


def tiny_model(name: str, steps: int = 40) -> ModelRecipe:
    """A built-in model's tokenizer kind in a size that is trained at once."""
    kind, size, layers, width = {"drafter": ("drafter-1.6m", 360, 1, 32), "other": ("target-12m", 480, 1, 48)}.get(
        name, ("target-7m", 420, 2, 48)
    )
    recipe = recipes.RECIPES[kind]
    model = replace(recipe.model, name=name, vocabulary_size=size, shape=shape(layers, width))
    return replace(recipe, model=model, training=Recipe(steps=steps, rows=4, length=64, peak_rate=1e-2))


@dataclass(frozen=True)
class TinyPair:
    """Folders of the two models, and a file of prompts of two datasets each."""

    target: Path
    drafter: Path
    sums: Path
    more: Path

    @property
    def options(self) -> list[str]:
        """Options of the command line for the pair."""
        return ["--target", str(self.target), "--drafter", str(self.drafter)]

    def copy_to(self, folder: Path) -> "TinyPair":
        """Return a pair whose weights may be changed: other processes read the files of this one."""
        target, drafter = (shutil.copytree(path, folder / path.name) for path in (self.target, self.drafter))
        return replace(self, target=target, drafter=drafter)


def scale_weights(folder: Path) -> None:
    """Change every weight of a model by a hundredth."""
    path = folder / "model.safetensors"
    weights = {name: 1.01 * weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def write_prompts(path: Path, texts: Sequence[str]) -> Path:
    """JSONL; each prompt is the beginning of its text."""
    rows = (json.dumps({"prompt": text[:30], "id": number}, ensure_ascii=False) for number, text in enumerate(texts))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def build_models(folder: Path, names: Sequence[str] = ("target", "drafter")) -> None:
    """Build tiny models as `python -m benchmarks.model_building` builds the large ones; only the text is another."""
    with patch.object(recipes, "documents", lambda recipe, data: sentences(0, 250)):
        for name in names:
            recipes.build(tiny_model(name), Path(), folder, lambda step, loss: None)


def make_pair(folder: Path) -> TinyPair:
    """Make the pair in a folder, unless it is there."""
    pair = TinyPair(folder / "target", folder / "drafter", folder / "sums.jsonl", folder / "more.jsonl")
    with FileLock(f"{folder}.lock"):
        if not pair.more.exists():
            folder.mkdir()
            build_models(folder)
            write_prompts(pair.sums, sentences(300, 310))
            write_prompts(pair.more, sentences(400, 410))
    return pair


@dataclass(frozen=True)
class TinyTrio:
    """A pair, and a second target whose vocabulary is a third one."""

    pair: TinyPair
    other: Path

    @property
    def targets(self) -> tuple[str, str]:
        """The names of both targets in settings."""
        return str(self.pair.target), str(self.other)


def make_trio(folder: Path) -> TinyTrio:
    """Make the trio next to its pair, unless it is there."""
    trio, done = TinyTrio(make_pair(folder), folder / "other"), folder / "other.done"
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            build_models(folder, ("other",))
            done.touch()
    return trio
