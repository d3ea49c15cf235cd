"""Makes built-in models from text by the recorded recipes: `python -m benchmarks.model_building drafter-1.6m`.

Minutes to an hour each on a CPU.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run
from benchmarks.model_building import distilled, recipes
from pipeline.models.catalog import MODELS_FOLDER

LOG = logging.getLogger("omnidraft.build")


def build(
    names: Annotated[list[str] | None, typer.Argument(help="Which models. [default: all]", show_default=False)] = None,
    data: Annotated[Path, typer.Option(help="Folder of the datasets, as Parquet files.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Where to put the models. [default: in the package]")] = MODELS_FOLDER,
    steps: Annotated[int | None, typer.Option(help="Fewer or more steps than the recipe's.", min=1)] = None,
) -> None:
    """Make built-in models from text by the recorded recipe."""
    for recipe in recipes.select_recipes(names or list(recipes.RECIPES), steps):
        name = recipe.model.name
        show = _make_log(name, recipe.training.steps)
        if distils := distilled.RECIPES.get(name):
            report = distilled.build(replace(distils, base=recipe), data, out, show)
        else:
            report = recipes.build(recipe, data, out, show)
        LOG.info("%s: validation loss %.3f nats per token", name, report.validation_loss)


def _make_log(name: str, steps: int) -> Callable[[int, float], None]:
    """Return a function to call after each step, which logs the loss of every hundredth part."""

    def log(step: int, loss: float) -> None:
        if step % -(-steps // 100) == 0:
            LOG.info("%s: step %d of %d, loss %.3f", name, step, steps, loss)

    return log


if __name__ == "__main__":
    run(build)
