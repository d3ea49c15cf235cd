"""`python -m pipeline.model_building`: make the built-in models again. Minutes to an hour each on a CPU."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from pipeline.model_building import distilled, recipes
from pipeline.models.catalog import MODELS_FOLDER

LOG = logging.getLogger("omnidraft.cli")


def build(
    names: Annotated[list[str] | None, typer.Argument(help="Which models. [default: all]", show_default=False)] = None,
    data: Annotated[Path, typer.Option(help="Folder of the datasets, as Parquet files.")] = Path("data"),
    out: Annotated[Path | None, typer.Option(help="Where to put the models. [default: in the package]")] = None,
    steps: Annotated[int | None, typer.Option(help="Fewer or more steps than the recipe's.", min=1)] = None,
) -> None:
    """Make built-in models from text by the recorded recipe."""
    for recipe in recipes.select_recipes(names or list(recipes.RECIPES), steps):
        name = recipe.model.name
        with _bar(Console(stderr=True), name, recipe.training.steps) as show:
            if distils := distilled.RECIPES.get(name):
                report = distilled.build(replace(distils, base=recipe), data, out or MODELS_FOLDER, show)
            else:
                report = recipes.build(recipe, data, out or MODELS_FOLDER, show)
        LOG.info("%s: validation loss %.3f nats per token", name, report.validation_loss)


@contextmanager
def _bar(console: Console, name: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Show a progress bar with the loss. Yields a function to call after each step."""
    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (*Progress.get_default_columns()[:2], loss_column, TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, loss=0.0)
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    typer.run(build)
