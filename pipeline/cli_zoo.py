"""`omnidraft zoo`: the built-in models. `omnidraft pad`: larger ones of the same outputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from store.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

zoo = typer.Typer(help="The built-in models: list them, find them, make them again.", no_args_is_help=True)


@zoo.command("list")
def list_models() -> None:
    """Name, role, vocabulary and whether the model is there."""
    from rich.console import Console
    from rich.table import Table

    from pipeline.zoo import MODELS_FOLDER, ZOO

    table = Table("name", "role", "vocabulary", "shape", "MB", "", caption="shape: layers x width")
    for model in ZOO.values():
        folder = MODELS_FOLDER / model.name
        size = sum(path.stat().st_size for path in folder.glob("*")) / 1e6 if folder.is_dir() else 0.0
        shape = f"{model.shape['num_hidden_layers']} x {model.shape['hidden_size']}"
        state = "" if size else "not built"
        table.add_row(f"builtin:{model.name}", model.role, f"{model.vocabulary_size:,}", shape, f"{size:.1f}", state)
    Console().print(table)


@zoo.command("path")
def path(name: Annotated[str, typer.Argument(help="A built-in model, such as drafter-1.6m.")]) -> None:
    """Print the folder of a built-in model."""
    from pipeline.zoo import path_of

    typer.echo(path_of(name.removeprefix("builtin:")))


@zoo.command("build")
def build(
    names: Annotated[list[str] | None, typer.Argument(help="Which models. [default: all]", show_default=False)] = None,
    data: Annotated[Path, typer.Option(help="Folder of the datasets, as Parquet files.")] = Path("data"),
    out: Annotated[Path | None, typer.Option(help="Where to put the models. [default: in the package]")] = None,
    steps: Annotated[int | None, typer.Option(help="Fewer or more steps than the recipe's.", min=1)] = None,
) -> None:
    """Make built-in models from text by the recorded recipe. Minutes to an hour each on a CPU."""
    from rich.console import Console

    from pipeline.zoo import MODELS_FOLDER, ZOO, chosen
    from pipeline.zoo import build as build_model

    console = Console(stderr=True)
    for model in chosen(names or list(ZOO), steps):
        with _bar(console, model.name, model.recipe.steps) as show:
            report = build_model(model, data, out or MODELS_FOLDER, show)
        console.print(f"{model.name}: validation loss {report.validation_loss:.3f} nats per token")


def pad(
    source: Annotated[str, typer.Argument(help="builtin:NAME, or the folder of a small Llama.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the padded model: a new or empty folder.")],
    parameters: Annotated[str, typer.Option(help="About how many, such as 100M.")] = "100M",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the weights that change nothing.")] = 0,
) -> None:
    """Pad a small Llama with weights that change nothing: its outputs at a larger model's cost, to measure speed."""
    from pipeline.zoo import path_of
    from stages.padding import write_padded

    _require_empty(folder)
    place = str(path_of(source.removeprefix("builtin:"))) if source.startswith("builtin:") else source
    found = write_padded(place, folder, _number(parameters), dtype, seed)
    shape = f"{found.widths.layers} layers x {found.widths.hidden}, MLP {found.widths.mlp}"
    typer.echo(f"{folder}: {found.parameters:,} parameters ({shape}), {dtype}")
    typer.echo(f"largest difference of logits to {source}: {found.difference:.2e} of the largest logit")


def _require_empty(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"a padded model must go to a new or empty folder, '{folder}' is neither; name another")


def _number(text: str) -> int:
    """`100M` is 100,000,000."""
    try:
        number = round(float(text[:-1]) * 1e6) if text[-1:] in ("m", "M") else int(text)
    except (ValueError, OverflowError):  # not a number, infinite
        number = 0
    if number <= 0:
        raise UsageError(f"--parameters must be a positive number such as 100M or 12000000, got {text!r}")
    return number


@contextmanager
def _bar(console: "Console", name: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A progress bar with the loss beside it; what it yields is to be called after each step."""
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    loss_column = TextColumn("loss {task.fields[loss]:.3f}")
    columns = (*Progress.get_default_columns()[:2], loss_column, TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, loss=0.0)
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)
