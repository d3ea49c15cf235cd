"""Makes built-in models from text by the recorded recipes: `python -m benchmarks.model_building drafter-1.6m`.

Minutes to an hour each on a CPU.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run
from benchmarks.model_building import distilled, recipes
from pipeline.models.catalog import MODELS_FOLDER
from pipeline.reports.terminal import stderr_console

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
        with _bar(name, recipe.training.steps) as show:
            if distils := distilled.RECIPES.get(name):
                report = distilled.build(replace(distils, base=recipe), data, out, show)
            else:
                report = recipes.build(recipe, data, out, show)
        LOG.info("%s: validation loss %.3f nats per token", name, report.validation_loss)


@contextmanager
def _bar(name: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Show a progress bar with the loss. Yields a function to call after each step."""
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (*Progress.get_default_columns()[:2], loss_column, TimeRemainingColumn())
    with Progress(*columns, console=stderr_console()) as bar:
        task = bar.add_task(name, total=steps, loss=0.0)
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


if __name__ == "__main__":
    run(build)
