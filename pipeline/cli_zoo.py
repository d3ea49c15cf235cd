"""`omnidraft zoo`: the built-in models."""

from pathlib import Path
from typing import Annotated

import typer

zoo = typer.Typer(help="The built-in models: list them, find them, make them again.", no_args_is_help=True)


@zoo.command("list")
def list_models() -> None:
    """Name, role, vocabulary and whether the model is there."""
    from rich.console import Console
    from rich.table import Table

    from pipeline.zoo import MODELS_FOLDER, ZOO

    table = Table("name", "role", "vocabulary", "layers x width", "MB", "folder")
    for model in ZOO.values():
        folder = MODELS_FOLDER / model.name
        size = sum(path.stat().st_size for path in folder.glob("*")) / 1e6 if folder.is_dir() else 0.0
        shape = f"{model.shape['num_hidden_layers']} x {model.shape['hidden_size']}"
        where = str(folder) if size else "not built"
        table.add_row(f"builtin:{model.name}", model.role, f"{model.vocabulary_size:,}", shape, f"{size:.1f}", where)
    Console().print(table)


@zoo.command("path")
def path(name: Annotated[str, typer.Argument(help="A built-in model, such as drafter-1.6m.")]) -> None:
    """Print the folder of a built-in model."""
    from pipeline.zoo import path_of

    typer.echo(path_of(name.removeprefix("builtin:")))


@zoo.command("build")
def build(
    names: Annotated[list[str] | None, typer.Argument(help="Which models. [default: all]", show_default=False)] = None,
    data: Annotated[Path, typer.Option(help="Folder of the prepared datasets.")] = Path("../shared/data"),
    out: Annotated[Path | None, typer.Option(help="Where to put the models. [default: in the package]")] = None,
    steps: Annotated[int | None, typer.Option(help="Fewer or more steps than the recipe's.", min=1)] = None,
) -> None:
    """Make built-in models from text by the recorded recipe. Minutes to an hour each on a CPU."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    from pipeline.zoo import MODELS_FOLDER, ZOO, chosen
    from pipeline.zoo import build as build_model

    console = Console(stderr=True)
    for model in chosen(names or list(ZOO), steps):
        with Progress(*Progress.get_default_columns()[:2], TextColumn("loss {task.fields[loss]:.3f}"),
                      TimeRemainingColumn(), console=console) as bar:  # fmt: skip
            task = bar.add_task(model.name, total=model.recipe.steps, loss=0.0)
            report = build_model(
                model, data, out or MODELS_FOLDER, lambda step, loss: bar.update(task, completed=step, loss=loss)
            )
        console.print(f"{model.name}: validation loss {report.validation_loss:.3f} nats per token")
